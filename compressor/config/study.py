"""What a study is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compressor.config.run import Recipe


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
