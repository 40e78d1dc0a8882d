"""Certificates for unseen rows: which steps of a search lose no more of the metric than allowed, with confidence.

The rows are divided once, before anything is computed. The search sees one part; on the other, its steps are tested in
order, each against "the true drop is more than the budget", until one test does not reject (fixed-sequence testing, as
in Angelopoulos et al. 2021, "Learn then test"). The first step that must fail does so with the requested confidence,
and no later step is tested, so no test needs a correction for the others.

Each test is a bet (Waudby-Smith, Ramdas 2024, "Estimating means of bounded random variables by betting"): capital that
cannot grow in expectation while the true drop is more than the budget reaches 1/p with probability p at most (Ville).
It needs independent rows and nothing else. The bet adapts to the variance of the rows, and both models give the same
answer for most rows; the Hoeffding-Bentkus bound cannot use that and is weaker (the tests compare them). Taking the
better of two p-values after seeing both would prove nothing, so that bound is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import Note, NoteCode
from compressor.selection.search import Step
from compressor.tasks.base import Task

_VARIANCE = 0.1
"""Variance of a row's difference that is assumed before the first row. It tunes the first bets only, no bound."""
_STAKE = 0.95
"""Share of the capital that one row may lose."""
_MAX_ROWS = 2**22


@dataclass(frozen=True)
class Certificate:
    """What was proven of the steps of a search on rows that it had not seen.

    Attributes:
        steps: number of certified steps, including the first (all heads, nothing to prove).
        drops: drop of accuracy on the unseen rows of every tested step, including the first.
        p_values: p-value of every tested step, including the first.
        confidence: confidence of the certificate.
        budget: drop of accuracy that it permits.
        searched_rows: rows that the search saw.
        unseen_rows: rows of the test.
        needed_rows: unseen rows at which the first step that failed would pass if they continued like these; None: no
            step failed, or no number of rows suffices.
    """

    steps: int
    drops: tuple[float, ...]
    p_values: tuple[float, ...]
    confidence: float
    budget: float
    searched_rows: int
    unseen_rows: int
    needed_rows: int | None

    def note(self, steps: Sequence[Step]) -> Note:
        """The result in words; `steps` are those that were tested."""
        total, kept = len(steps[0].kept), len(steps[self.steps - 1].kept)
        rows = f"the search saw {self.searched_rows} evaluation rows, the test {self.unseen_rows} others"
        if len(steps) == 1:
            text = f"nothing to certify: the search removed no head; {rows}"
            return Note(code=NoteCode.NOT_CERTIFIED, text=text)
        claim = f"a drop of at most {self.budget:g} with {100 * self.confidence:g}% confidence"
        if self.steps > 1:
            code = NoteCode.CERTIFIED
            text = (
                f"certified: {claim}, for {total - kept} of {total} heads removed; accuracy on the unseen rows fell by"
                f" {self.drops[self.steps - 1]:.4g} (p = {self.p_values[self.steps - 1]:.2g}); {rows}"
            )
        else:
            code = NoteCode.NOT_CERTIFIED
            text = f"nothing was certified and every head is kept: {claim} was requested; {rows}"
        if self.steps < len(steps):
            removed = total - len(steps[self.steps].kept)
            text += f"; with {removed} heads removed it fell by {self.drops[-1]:.4g} (p = {self.p_values[-1]:.2g}), "
            if self.needed_rows is None:
                text += "which more rows like these would not certify"
            else:
                text += f"which about {self.needed_rows} unseen rows like these would certify"
        return Note(code=code, text=text)


def p_value(differences: np.ndarray, budget: float, confidence: float) -> np.ndarray:
    """p-value of "the mean difference over the whole population is more than `budget`".

    Args:
        differences: loss after minus loss before of each row, in {-1, 0, 1}, in random order, `[..., rows]`.
        budget: from 0 to below 1.
        confidence: the bets are tuned to reach 1 / (1 - confidence); the p-value is valid for any.

    Returns:
        `[...]`.
    """
    rows = differences.shape[-1]
    counts = np.arange(1, rows + 1)
    mean = np.cumsum(differences, -1) / (counts + 1)
    variance = (_VARIANCE + np.cumsum((differences - mean) ** 2, -1)) / (counts + 1)
    before = np.concatenate([np.full_like(variance[..., :1], _VARIANCE), variance[..., :-1]], -1)
    # A bet may depend on the rows before it only. A row loses at most 1 - budget of the stake.
    bet = np.minimum(np.sqrt(-2 * math.log(1 - confidence) / (rows * before)), _STAKE / (1 - budget))
    capital = np.cumsum(np.log1p(bet * (budget - differences)), -1)
    return np.exp(-np.maximum(capital.max(-1), 0.0))


def rows_needed(differences: np.ndarray, budget: float, confidence: float) -> int | None:
    """The smallest number of rows that would be certified if they continued as `differences` `[rows]`, to about 1%.

    Args:
        differences: loss after minus loss before of each row.
        budget: drop that is permitted.
        confidence: confidence of the certificate.

    Returns:
        None if the rows lose the budget or more, or if more than four million rows would be needed.
    """
    if differences.mean() >= budget:
        return None

    def suffices(rows: int) -> bool:
        return bool(p_value(np.resize(differences, rows), budget, confidence) <= 1 - confidence)

    low, high = 0, 16
    while not suffices(high):
        low, high = high, 2 * high
        if high > _MAX_ROWS:
            return None
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def split_rows(rows: Dataset, task: Task, budget: float, confidence: float, seed: int) -> tuple[Dataset, Dataset]:
    """Half of the rows to search on, and the other half, in random order, to certify on.

    Args:
        rows: the evaluation rows.
        task: its metric must be the accuracy of a text classifier.
        budget: drop of accuracy that is permitted.
        confidence: confidence of the certificate.
        seed: seed of the division.

    Raises:
        UsageError: the metric is not a share of rows, or the budget is not between 0 and 1.
        InputError: too few rows to certify even a search that loses nothing.
    """
    if task.name != "text-classification" or task.metric != "accuracy":
        raise UsageError(
            f"--certify {confidence:g}: it certifies the accuracy of a text classifier, not the {task.metric} of"
            f" {task.name}; omit --certify",
            code=ErrorCode.UNSUPPORTED,
            field="certify",
            value=confidence,
            task=task.name,
            metric=task.metric,
        )
    if not 0 < budget < 1:
        raise UsageError(
            f"--max-drop {budget:g}: a certificate bounds a loss of accuracy; set a share between 0 and 1, e.g. 0.01",
            code=ErrorCode.OUT_OF_RANGE,
            field="max_drop",
            value=budget,
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    searched, unseen = order[: (len(rows) + 1) // 2], order[(len(rows) + 1) // 2 :]
    minimum = rows_needed(np.zeros(1), budget, confidence)
    if minimum is None or len(unseen) < minimum:
        raise InputError(
            f"{len(rows)} evaluation rows: half of them certify a drop of at most {budget:g} with"
            f" {100 * confidence:g}% confidence only from {'millions' if minimum is None else 2 * minimum} rows on, if"
            " nothing is lost; add rows (--eval-data), or raise --max-drop",
            code=ErrorCode.TOO_FEW_ROWS,
            rows=len(rows),
            minimum=None if minimum is None else 2 * minimum,
        )
    return rows.select(sorted(searched.tolist())), rows.select(unseen.tolist())


def certify(
    steps: Sequence[Step],
    losses: Callable[[Step], np.ndarray],
    budget: float,
    confidence: float,
    searched_rows: int,
) -> Certificate:
    """Test the steps in order until one fails.

    Args:
        steps: the steps of a search, each with fewer heads than the one before; the first has all heads.
        losses: 1.0 for each unseen row that the model with a step's heads gets wrong, else 0.0, `[rows]`, in random
            order.
        budget: drop of accuracy that is permitted.
        confidence: confidence that a certified drop is within the budget.
        searched_rows: rows that the search saw.
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
    return Certificate(passed, tuple(drops), tuple(p_values), confidence, budget, searched_rows, len(dense), needed)


def removal_steps(steps: Iterable[Step]) -> list[Step]:
    """The steps that remove heads, and the first."""
    removals: list[Step] = []
    for step in steps:
        if not removals or step.kept != removals[-1].kept:
            removals.append(step)
    return removals
