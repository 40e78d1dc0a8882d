"""How heads are selected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from compressor.config.fields import Config, config_field, one_of
from compressor.config.methods import METHODS, SEARCH_METHODS
from compressor.config.sections.headings import BUDGET, HEADS
from compressor.config.values import Count, Keep, Natural, NonNegative, Options, Positive, Workers


class SelectionConfig(Config):
    """How heads are selected, and how the model is trained meanwhile."""

    plan: Path | None = config_field(HEADS, "plan.json to follow instead of selecting units", is_path=True)
    method: Annotated[str, AfterValidator(one_of(tuple(METHODS)))] = config_field(
        HEADS,
        "method that selects units; default with a budget or a maximum drop alone: reconstruct",
        "dsp",
        decides_plan=True,
        choices=tuple(METHODS),
        is_basic=True,
    )
    keep: Keep | None = config_field(
        HEADS, "heads to keep in the whole model: 36 or 50%", decides_plan=True, is_basic=True
    )
    certify: Annotated[float, Field(gt=0, lt=1)] | None = config_field(
        HEADS,
        "confidence (0.95) at which a search, or --max-drop without a budget, certifies the drop of the metric on"
        " unseen examples; units that fail stay",
        decides_plan=True,
    )
    ray: Workers | None = config_field(
        HEADS, "Ray workers of a search: local, local:4 for four workers, or HOST:PORT of a cluster", runs_code=True
    )
    options: Options = config_field(
        HEADS, "options of the method: name=value, separated by commas", {}, decides_plan=True
    )
    epochs: Positive | None = config_field(
        HEADS, "passes over the training examples; default: 3, or 1 for dsp-pipelined", decides_plan=True
    )
    training_steps: Count | None = config_field(HEADS, "training steps, instead of epochs", decides_plan=True)
    batch_size: Count = config_field(HEADS, "examples per training step and process", 32, decides_plan=True)
    learning_rate: Positive = config_field(HEADS, "peak learning rate of the model", 5e-5, decides_plan=True)
    seed: Natural = config_field(HEADS, "seed of every random draw", 0, decides_plan=True)
    max_drop: NonNegative | None = config_field(
        BUDGET,
        "maximum drop of the metric in its unit (0.01: a point of accuracy); a larger drop fails the run; without"
        " a budget as many units are removed as it permits, and by a search without --keep as many heads",
        is_basic=True,
    )

    @property
    def searches(self) -> bool:
        """Whether the method evaluates subsets instead of learning gates."""
        return self.method in SEARCH_METHODS
