"""What to study: a recipe, a size, and the axes along which the cells vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import pydantic
from pydantic import BeforeValidator

from compressor.config.fields import Config, as_list, config_field, flag_of, usage_error
from compressor.config.recipe_file import RecipeFile
from compressor.config.run import Recipe
from compressor.config.sections import BudgetConfig, DistillationConfig
from compressor.config.values import Keep, Names, Natural, NonNegative, Share
from compressor.errors import ErrorCode, UsageError

AXES = "Axes"
RESERVED = (
    *("plan", "method", "keep", "certify", "max_drop", "ray", "force"),
    *("drop_blocks", "drop_blocks_by_kind", "maps", "random_blocks", "mask_all_sites", "entmax"),
)
"""Fields of a recipe that a study sets itself. `ray` is among them: the flag of that name applies to the study."""
UNREAD = (*BudgetConfig.model_fields, *DistillationConfig.model_fields, "unlabelled_data", "save_dense")
"""Fields of a recipe that no study reads: `benchmarks.compare_methods` compares methods under budgets, and studies
write no graphs."""


class StudyAxes(Config):
    """Values to vary, axis by axis; None: the study's own values."""

    methods: Names | None = config_field(AXES, "methods to compare, separated by commas", is_basic=True)
    keeps: Annotated[tuple[Keep, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "numbers of heads to keep, as counts or shares, separated by commas", is_basic=True
    )
    seeds: Annotated[tuple[Natural, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "seeds, separated by commas", is_basic=True
    )
    budgets: Annotated[tuple[NonNegative, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "losses of the metric that a search may cause, in points, separated by commas", is_basic=True
    )
    variants: Names | None = config_field(AXES, "variants of A*, separated by commas", is_basic=True)
    penalties: Annotated[tuple[NonNegative, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "weights of the penalty, separated by commas", is_basic=True
    )
    shares: Annotated[tuple[Share, ...], BeforeValidator(as_list)] | None = config_field(
        AXES,
        "shares of the blocks to drop, separated by commas; 0: as many training steps without masks",
        is_basic=True,
    )
    kinds: Names | None = config_field(
        AXES,
        "kinds of attention whose blocks are dropped, separated by commas: bidirectional, causal, cross,"
        " bidirectional+causal, or all",
        is_basic=True,
    )
    masks: Names | None = config_field(AXES, "sources of masks, separated by commas: own, random", is_basic=True)
    grids: Names | None = config_field(
        AXES, "folders of finished grid studies whose selections are timed, separated by commas"
    )


def axes_of(flags: Mapping[str, str]) -> dict[str, tuple[Any, ...]]:
    """The axes that flags set: name -> values without repeats.

    Raises:
        UsageError: a value is out of its range, or a flag holds no value.
    """
    try:
        axes = StudyAxes(**flags)
    except pydantic.ValidationError as error:
        raise usage_error(error, StudyAxes.model_fields, flag_of) from error
    values = {name: tuple(dict.fromkeys(getattr(axes, name))) for name in flags}
    for name, value in values.items():
        if not value:
            raise UsageError(
                f"{flag_of(name)} {flags[name]!r}: no values; give some, separated by commas",
                code=ErrorCode.MISSING_VALUE,
                field=name,
            )
    return values


def recipe_of_study(model: str | None, stored: RecipeFile, flags: Mapping[str, Any]) -> Recipe:
    """The recipe of a study: a flag wins over the file. It keeps every head, since the cells set the number to keep.

    Args:
        model: the model folder; None where the file names it.
        stored: the recipe file. Its fields that a study sets itself or does not read are ignored.
        flags: field name -> value of its flag.

    Raises:
        UsageError: no model is named, or a value is out of its range.
    """
    ignored = (*RESERVED, *UNREAD)
    fields = {name: value for name, value in stored.fields.items() if name not in ignored}
    keep = {"keep": "100%"} if "data" in {**fields, **flags} else {}
    return replace(stored, fields={**fields, **keep}).with_flags(model, flags)


@dataclass(frozen=True)
class StudySize:
    """The amount of work of a study.

    Attributes:
        name: value of `--size`.
        train, eval, test: maximum numbers of training, evaluation and test rows; None: all rows.
        epochs: passes over the training rows.
        steps: maximum number of training steps; None: no limit besides the epochs.
        seeds: seeds of the cells.
        keeps: heads to keep, where a study varies them.
        evaluations: evaluations during a training; each writes a checkpoint.
        sample: training rows that a sensitivity is averaged over.
        trials: number of random subsets or orders of heads to evaluate.
        masks: random masks to time for each number of heads.
        seconds: approximate time spent on each measurement.
        searched: maximum number of evaluation rows for searches that evaluate thousands of subsets; None: all rows.
    """

    name: str
    train: int | None
    eval: int | None
    test: int | None
    epochs: float
    steps: int | None
    seeds: tuple[int, ...]
    keeps: tuple[str | int, ...]
    evaluations: int
    sample: int
    trials: int
    masks: int
    seconds: float
    searched: int | None = None

    def __str__(self) -> str:
        rows = ", ".join(
            f"{'all' if maximum is None else f'at most {maximum:,}'} {kind}"
            for kind, maximum in (("training", self.train), ("evaluation", self.eval), ("test", self.test))
        )
        steps = "" if self.steps is None else f", at most {self.steps} steps"
        return f"{self.name}: {rows} rows; {self.epochs:g} epochs{steps}"


KEEPS = ("83.3%", "50%", "33.3%", "16.7%", "8.3%", "4.2%")
"""60, 36, 24, 12, 6 and 3 heads of 72: the levels of Li et al. 2021, as shares."""
SIZES = {
    "tiny": StudySize("tiny", 256, 64, 128, 2.0, 12, (1,), ("50%", "8.3%"), 2, 32, 5, 2, 0.02, 64),
    "small": StudySize("small", 10_000, 1_000, 5_000, 2.0, 200, (1, 2, 3), KEEPS, 4, 500, 100, 10, 3.0, 200),
    "paper": StudySize("paper", None, None, None, 3.0, None, (1, 2, 3, 4, 5), KEEPS, 12, 10_000, 100, 10, 10.0),
}
"""tiny takes a minute, small at most two hours on two cores; paper is the size of the papers' experiments."""


@dataclass(frozen=True)
class StudyRequest:
    """What to study.

    Attributes:
        recipe: model, rows, training schedule and engine.
        size: amount of work.
        sources: data sets to compare; the first is the recipe's own.
        axes: axis name -> values; an axis that is absent takes the study's own values.
        ray: where Ray runs workers, as in the field `ray` of a recipe; results do not depend on it.
    """

    recipe: Recipe
    size: StudySize
    sources: tuple[str, ...] = ()
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ray: str | None = None
