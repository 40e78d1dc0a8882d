"""How heads are selected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from compressor.config.fields import Config, config_field, one_of
from compressor.config.methods import METHODS, SEARCH_METHODS
from compressor.config.sections.headings import HEADS, MEASURING
from compressor.config.values import Count, Keep, Natural, NonNegative, Options, Positive, Workers


class SelectionConfig(Config):
    """How heads are selected, and how the model is trained meanwhile."""

    plan: Path | None = config_field(HEADS, "plan.json to follow; no unit is selected", is_path=True)
    method: Annotated[str, AfterValidator(one_of(tuple(METHODS)))] = config_field(
        HEADS,
        "method that selects the units; the default is reconstruct with a budget, and with max_drop alone",
        "dsp",
        decides_plan=True,
        choices=tuple(METHODS),
    )
    keep: Keep | None = config_field(
        HEADS, "heads to keep over the whole model: a count (36) or a share (50%)", decides_plan=True
    )
    certify: Annotated[float, Field(gt=0, lt=1)] | None = config_field(
        HEADS,
        "confidence (0.95) with which a search, or max_drop without a budget, certifies the drop of the metric on"
        " unseen rows; units that fail stay",
        decides_plan=True,
    )
    ray: Workers | None = config_field(
        HEADS,
        "distribute a search with Ray: local, local:4 for four workers, or HOST:PORT of a cluster",
        runs_code=True,
    )
    options: Options = config_field(
        HEADS, "options of the method: name=value, separated by commas", {}, decides_plan=True
    )
    epochs: Positive | None = config_field(
        HEADS, "passes over the training rows; default: 3, or 1 for dsp-pipelined", decides_plan=True
    )
    training_steps: Count | None = config_field(HEADS, "optimizer steps, instead of epochs", decides_plan=True)
    batch_size: Count = config_field(HEADS, "rows per step and process", 32, decides_plan=True)
    learning_rate: Positive = config_field(HEADS, "peak learning rate of the model", 5e-5, decides_plan=True)
    seed: Natural = config_field(HEADS, "seed of every random draw", 0, decides_plan=True)
    max_drop: NonNegative | None = config_field(
        MEASURING,
        "maximum loss of the metric, in its own unit (0.01 is one point of accuracy): the run fails if more is lost;"
        " alone, units are removed until the engine is as fast as this loss permits; a search without --keep removes"
        " as many heads as it permits",
    )

    @property
    def searches(self) -> bool:
        """Whether the method evaluates subsets instead of learning gates."""
        return self.method in SEARCH_METHODS
