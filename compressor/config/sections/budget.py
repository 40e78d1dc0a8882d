"""What the compressed model may cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from compressor.config.fields import Config, config_field
from compressor.config.sections.headings import BUDGET
from compressor.config.values import BudgetShare, GroupBy, Milliseconds, Shapes


class BudgetConfig(Config):
    """What the compressed model may cost, and what is pruned to meet it."""

    speedup: Annotated[float, Field(ge=1)] | None = config_field(
        BUDGET,
        "speed to reach, as a multiple of the runtime's own engine of the whole model: 2, or 2,4,8 for a ladder",
        decides_plan=True,
        is_basic=True,
    )
    latency: Milliseconds | None = config_field(
        BUDGET, "maximum median time of a call: 5ms", decides_plan=True, is_basic=True
    )
    macs: BudgetShare | None = config_field(
        BUDGET, "share of the multiply-accumulates to keep: 50%", decides_plan=True, is_basic=True
    )
    parameters: BudgetShare | None = config_field(
        BUDGET, "share of the parameters to keep, embeddings included: 60%", decides_plan=True
    )
    budget_at: Shapes = config_field(
        BUDGET,
        "batch sizes and lengths at which --speedup, --latency and --macs hold: 1x128; default: every size that"
        " is timed",
        (),
        decides_plan=True,
    )
    prune_units: Literal["all", "heads", "neurons"] = config_field(
        BUDGET, "units that a budget removes", "all", decides_plan=True
    )
    group_by: GroupBy = config_field(
        BUDGET,
        "how a budget removes query heads that share key/value heads: all query heads of a key/value head (kv),"
        " or as many from every key/value head (query)",
        "kv",
        decides_plan=True,
    )
    prune_rows: Annotated[int, Field(ge=8)] = config_field(
        BUDGET,
        "maximum number of training examples by which units are chosen and refitted; fewer where they exceed"
        " 131,072 tokens, or 64 times this number if that is more; labels are not used",
        2048,
        decides_plan=True,
    )
    statistics: Path | None = config_field(
        BUDGET,
        "folder that keeps Gram matrices and losses for runs with other budgets on the same model and examples;"
        " default: they are deleted after the run",
        is_path=True,
    )
    start_from: Path | None = config_field(
        BUDGET,
        "output folder of an earlier run under a budget on MODEL, to prune further",
        decides_plan=True,
        is_path=True,
    )
    match_dense: bool = config_field(
        BUDGET,
        "choose and train the units of a sentence encoder by how it ranks documents that the dense model"
        " embedded, for an index that is not built again",
        False,
        decides_plan=True,
    )
    compare_points: Path | None = config_field(
        BUDGET,
        "JSON file of engines of other tools, with their metrics and speeds, which the page of a ladder shows",
        is_path=True,
    )
    skip_refused: bool = config_field(
        BUDGET,
        "keep groups of units that cannot be removed from the graph, instead of failing",
        False,
        decides_plan=True,
    )

    @property
    def is_set(self) -> bool:
        """Whether any budget is set."""
        return any(value is not None for value in (self.speedup, self.latency, self.macs, self.parameters))

    @property
    def is_timed(self) -> bool:
        """Whether the budget is one of time."""
        return self.speedup is not None or self.latency is not None

    @property
    def milliseconds(self) -> float | None:
        """The time that a call may take."""
        return None if self.latency is None else float(self.latency.removesuffix("ms"))
