"""How much a study does: what `--size` stands for."""

from __future__ import annotations

from dataclasses import dataclass

KEEPS = ("83.3%", "50%", "33.3%", "16.7%", "8.3%", "4.2%")
"""60, 36, 24, 12, 6 and 3 heads of 72: the levels of Li et al. 2021, as shares."""


@dataclass(frozen=True)
class Size:
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


SIZES = {
    "tiny": Size("tiny", 256, 64, 128, 2.0, 12, (1,), ("50%", "8.3%"), 2, 32, 5, 2, 0.02, 64),
    "small": Size("small", 10_000, 1_000, 5_000, 2.0, 200, (1, 2, 3), KEEPS, 4, 500, 100, 10, 3.0, 200),
    "paper": Size("paper", None, None, None, 3.0, None, (1, 2, 3, 4, 5), KEEPS, 12, 10_000, 100, 10, 10.0),
}
"""A minute; two hours at most on two cores; what the papers did."""
