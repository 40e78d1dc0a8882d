"""What `compress study` is asked to do: a recipe, a size, and the axes along which its cells vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic
from pydantic import BeforeValidator

from compressor.config.fields import Config, as_list, config_field, flag_of, usage_error
from compressor.config.run import Recipe
from compressor.config.values import Keep, Names, Natural, NonNegative, Share
from compressor.errors import ErrorCode, UsageError

AXES = "Axes"
RESERVED = (
    *("plan", "method", "keep", "certify", "max_drop", "ray", "force"),
    *("drop_blocks", "drop_blocks_by_kind", "maps", "random_blocks", "mask_all_sites", "entmax"),
)
"""Fields of a recipe that a study sets itself. A recipe's `ray` is for its own search, the flag for the study's."""


class StudyAxes(Config):
    """Values to vary, axis by axis; None: the study's own values."""

    methods: Names | None = config_field(AXES, "methods to compare, separated by commas")
    keeps: Annotated[tuple[Keep, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "numbers of heads to keep, as counts or shares, separated by commas"
    )
    seeds: Annotated[tuple[Natural, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "seeds, separated by commas"
    )
    budgets: Annotated[tuple[NonNegative, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "losses of the metric that a search may cause, in points, separated by commas"
    )
    variants: Names | None = config_field(AXES, "variants of A*, separated by commas")
    penalties: Annotated[tuple[NonNegative, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "weights of the penalty, separated by commas"
    )
    shares: Annotated[tuple[Share, ...], BeforeValidator(as_list)] | None = config_field(
        AXES, "shares of the blocks to drop, separated by commas; 0: as many steps without masks"
    )
    kinds: Names | None = config_field(
        AXES,
        "kinds of attention whose blocks are dropped, separated by commas: bidirectional, causal, cross,"
        " bidirectional+causal, or all",
    )
    masks: Names | None = config_field(AXES, "sources of masks, separated by commas: own, random")
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


@dataclass(frozen=True)
class StudySize:
    """What is done at most.

    Attributes:
        name: what `--size` says.
        train, eval, test: rows to learn from, to choose on and to report on, at most; None: all that there are.
        epochs: passes over the rows to learn from.
        steps: optimizer steps at most; None: as the epochs say.
        seeds: seeds of the cells.
        keeps: heads to keep, where a study varies them.
        evaluations: evaluations over a run that learns; a checkpoint goes with each.
        sample: training rows that a sensitivity is averaged over.
        trials: random ways to try.
        masks: random masks of each number of heads that are timed.
        seconds: about how long to time each.
        searched: rows that a search evaluates thousands of subsets on, at most.
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
            f"{'all' if most is None else f'at most {most:,}'} {kind}"
            for kind, most in (("training", self.train), ("evaluation", self.eval), ("test", self.test))
        )
        steps = "" if self.steps is None else f", at most {self.steps} steps"
        return f"{self.name}: {rows} rows; {self.epochs:g} epochs{steps}"


@dataclass(frozen=True)
class StudyRequest:
    """What a study is asked for.

    Attributes:
        recipe: model, rows, pace of learning, engine.
        size: how much of it.
        sources: data sets that are compared with each other; the first is the recipe's own.
        axes: what is varied, name -> values; what is not there takes the study's own values.
        ray: where evaluations are spread, as in `spread`; it decides no result.
    """

    recipe: Recipe
    size: StudySize
    sources: tuple[str, ...] = ()
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ray: str | None = None
