"""A guarantee that holds on unseen rows: which steps of a search surely cost no more than was allowed.

The rows are divided once, before anything is looked at. The search sees one part; on the other its steps are tested
in their order, each against "the true drop is more than the budget", until one is not rejected (fixed-sequence
testing, as in Angelopoulos et al. 2021, "Learn then test"): the first step that should fail does so with the
confidence asked for, and nothing after it is tested, so no test is corrected for the others.

Each test is a bet (Waudby-Smith, Ramdas 2024, "Estimating means of bounded random variables by betting"): capital
that cannot grow in expectation while the true drop is more than the budget reaches 1/p with probability p at most
(Ville). It needs independent rows and nothing else. The bet adapts to the rows' variance, and most rows are answered
alike by both models; the Hoeffding-Bentkus bound cannot use that and is weaker (`tests/test_certify.py` compares
them), so it is left out for good: taking the better of two p-values after seeing them would prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from compressor.errors import InputError, UsageError
from compressor.selection.search import Step
from compressor.tasks.base import Task

_VARIANCE = 0.1
"""Of a row's difference, assumed before the first row is seen: it tunes the first bets, no bound depends on it."""
_STAKE = 0.95
"""Share of the capital that one row may lose."""
_MOST_ROWS = 2**22


@dataclass(frozen=True)
class Certificate:
    """What was proven of a search's steps on rows that it had not seen.

    Attributes:
        steps: how many of them, the first included (all heads, nothing to prove).
        drops: of accuracy on the unseen rows, of every step tested, the first included.
        p_values: of the same.
        confidence, budget: what was asked for.
        searched, unseen: rows of the two parts.
        needed: unseen rows at which the first step that failed would pass if they went on like these; None: none did
            fail, or no number would do.
    """

    steps: int
    drops: tuple[float, ...]
    p_values: tuple[float, ...]
    confidence: float
    budget: float
    searched: int
    unseen: int
    needed: int | None

    def note(self, steps: Sequence[Step]) -> str:
        """The result in words."""
        total, stay = len(steps[0].kept), len(steps[self.steps - 1].kept)
        rows = f"the search saw {self.searched} evaluation rows, the test {self.unseen} others"
        if len(steps) == 1:
            return f"nothing to certify: the search removed no head; {rows}"
        asked = f"a drop of at most {self.budget:g} with {100 * self.confidence:g}% confidence"
        if self.steps > 1:
            found = (
                f"certified: {asked}, for {total - stay} of {total} heads removed; on the unseen rows accuracy fell by"
            )
            found += f" {self.drops[self.steps - 1]:.4g} (p = {self.p_values[self.steps - 1]:.2g}); {rows}"
        else:
            found = f"nothing was certified, every head stays: {asked} was asked for; {rows}"
        if self.steps == len(steps):
            return found
        gone = total - len(steps[self.steps].kept)
        found += f"; {gone} removed fell by {self.drops[-1]:.4g} (p = {self.p_values[-1]:.2g}), "
        if self.needed is None:
            return found + "which more rows like these would not certify"
        return found + f"which about {self.needed} unseen rows like these would certify"


def p_value(differences: np.ndarray, budget: float, confidence: float) -> np.ndarray:
    """p-value of "the mean difference of all rows there are is more than `budget`".

    Args:
        differences: loss after minus loss before of each row, in {-1, 0, 1}, in random order, `[..., rows]`.
        budget: from 0 up to below 1.
        confidence: the bets are tuned to reach 1 / (1 - confidence); the p-value is valid whatever it is.

    Returns:
        `[...]`.
    """
    rows = differences.shape[-1]
    seen = np.arange(1, rows + 1)
    mean = np.cumsum(differences, -1) / (seen + 1)
    variance = (_VARIANCE + np.cumsum((differences - mean) ** 2, -1)) / (seen + 1)
    before = np.concatenate([np.full_like(variance[..., :1], _VARIANCE), variance[..., :-1]], -1)
    # A bet may know the rows before it and no other. A row at worst loses 1 - budget of what is bet.
    bet = np.minimum(np.sqrt(-2 * math.log(1 - confidence) / (rows * before)), _STAKE / (1 - budget))
    capital = np.cumsum(np.log1p(bet * (budget - differences)), -1)
    return np.exp(-np.maximum(capital.max(-1), 0.0))


def rows_needed(differences: np.ndarray, budget: float, confidence: float) -> int | None:
    """The least number of rows that would be certified if they went on as `differences` `[rows]` do, to about 1%.

    None: they cost the budget or more, or it would take more than four million.
    """
    if differences.mean() >= budget:
        return None

    def enough(rows: int) -> bool:
        return bool(p_value(np.resize(differences, rows), budget, confidence) <= 1 - confidence)

    low, high = 0, 16
    while not enough(high):
        low, high = high, 2 * high
        if high > _MOST_ROWS:
            return None
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def divide(rows: Dataset, task: Task, budget: float, confidence: float, seed: int) -> tuple[Dataset, Dataset]:
    """Half of the rows to search on, and the other half, in random order, to certify on.

    Raises:
        UsageError: the metric is not a share of rows, or the budget is not one of 0 to 1.
        InputError: too few rows to certify even a search that loses nothing.
    """
    if task.name != "text-classification" or task.metric != "accuracy":
        raise UsageError(
            f"guarantee {confidence:g}: certifies the accuracy of a text classifier, not the {task.metric} of"
            f" {task.name}; leave --guarantee out"
        )
    if not 0 < budget < 1:
        raise UsageError(
            f"max_drop {budget:g}: a guarantee needs a share of accuracy above 0 and below 1, such as 0.01"
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    searched, unseen = order[: (len(rows) + 1) // 2], order[(len(rows) + 1) // 2 :]
    least = rows_needed(np.zeros(1), budget, confidence)
    if least is None or len(unseen) < least:
        raise InputError(
            f"{len(rows)} evaluation rows: half of them certify a drop of at most {budget:g} with"
            f" {100 * confidence:g}% confidence only from {'millions' if least is None else 2 * least} rows on, even if"
            " nothing is lost; give more (--eval-data), or a larger --max-drop"
        )
    return rows.select(sorted(searched.tolist())), rows.select(unseen.tolist())


def certify(
    steps: Sequence[Step],
    losses: Callable[[Step], np.ndarray],
    budget: float,
    confidence: float,
    searched: int,
) -> Certificate:
    """Test the steps in their order until one fails.

    Args:
        steps: of a search, fewer heads by and by, the first with all heads.
        losses: 1.0 for each unseen row that a step's heads get wrong, else 0.0, `[rows]`, in random order.
        budget: the accuracy that may be lost.
        confidence: with which a certified drop is within the budget.
        searched: rows that the search saw.
    """
    dense = losses(steps[0])
    drops, p_values, needed, passed = [0.0], [0.0], None, 1
    for step in steps[1:]:
        differences = losses(step) - dense
        drops.append(float(differences.mean()))
        p_values.append(float(p_value(differences, budget, confidence)))
        if p_values[-1] > 1 - confidence:
            needed = rows_needed(differences, budget, confidence)
            break
        passed += 1
    return Certificate(passed, tuple(drops), tuple(p_values), confidence, budget, searched, len(dense), needed)


def removal_steps(steps: Iterable[Step]) -> list[Step]:
    """The steps that remove heads, and the first."""
    found: list[Step] = []
    for step in steps:
        if not found or step.kept != found[-1].kept:
            found.append(step)
    return found
