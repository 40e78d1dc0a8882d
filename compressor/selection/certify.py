"""Certificates for unseen rows: decisions of a search that lose no more of the metric than allowed, with confidence.

The rows are divided once, before anything is computed. The search sees one part. On the other part its decisions are
tested in order, each against the hypothesis "the true drop is more than the budget", until one test does not reject
(fixed-sequence testing, as in Angelopoulos et al. 2021, "Learn then test"). The first decision whose true drop is more
than the budget fails its test with the requested confidence, and later ones are not tested, so the tests need no
correction for their number.

Each test is a sequence of bets (Waudby-Smith, Ramdas 2024, "Estimating means of bounded random variables by betting"):
capital that cannot grow in expectation while the true drop is more than the budget reaches 1/p with probability at most
p (Ville's inequality). The test assumes only that rows are independent. The bets adapt to the variance of the rows,
which is small because both models give the same answer for most rows. The Hoeffding-Bentkus bound does not use the
variance and is weaker (the tests compare them). It is not computed, because the better of two p-values, selected after
seeing both, would prove nothing.

A certificate holds with its confidence once for a set of rows. The best of several certificates, e.g. of several seeds
or models, holds with less confidence. Each certificate therefore states how many earlier ones used some of its rows,
which are recorded in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import CertificateScope, CertifiedLoss, Note, NoteCode
from compressor.targets.machine import user_cache
from compressor.tasks import Data
from compressor.tasks.base import Task
from graph_passes.files import atomic_replace

T = TypeVar("T")
_VARIANCE = 0.1
"""Variance of a row's difference that the first bet assumes; it affects the size of bets, not their validity."""
_STAKE = 0.95
"""Maximum share of the capital that one row may lose."""
_MAX_ROWS = 2**22
"""Largest number of rows that `rows_needed` considers."""


@dataclass(frozen=True)
class Certificate:
    """The result of testing the decisions of a search on rows that the search has not seen.

    Attributes:
        certified: number of certified decisions, including the first, which keeps all units and needs no proof.
        drops: drop of accuracy on the unseen rows, of every tested decision including the first.
        p_values: p-value of every tested decision including the first.
        budget: permitted drop of accuracy.
        needed_rows: number of unseen rows with which the first failed decision would pass, if further rows are like
            these; None: no decision failed, or no number of rows suffices.
    """

    certified: int
    drops: tuple[float, ...]
    p_values: tuple[float, ...]
    confidence: float
    budget: float
    searched_rows: int
    unseen_rows: int
    needed_rows: int | None

    def result(self, kept_units: Sequence[int], scope: CertificateScope, units: str = "heads") -> CertifiedLoss:
        """The certified loss, for the report, by the number of units that each decision keeps that `certify` had."""
        last = self.certified - 1
        return CertifiedLoss(
            max_drop=self.budget,
            confidence=self.confidence,
            units=units,
            removed=kept_units[0] - kept_units[last],
            total=kept_units[0],
            drop=self.drops[last],
            p_value=self.p_values[last],
            searched_rows=self.searched_rows,
            unseen_rows=self.unseen_rows,
            scope=scope,
        )

    def note(self, kept_units: Sequence[int], scope: CertificateScope, units: str = "heads") -> Note:
        """The result as a note; see `result` for the arguments."""
        total, kept = kept_units[0], kept_units[self.certified - 1]
        rows = f"the search saw {self.searched_rows} evaluation rows, the test {self.unseen_rows} further rows"
        if len(kept_units) == 1:
            text = f"nothing to certify: the search removed no {units}; {rows}"
            return Note(code=NoteCode.NOT_CERTIFIED, text=text)
        claim = f"a drop of at most {self.budget:g} with {100 * self.confidence:g}% confidence"
        if self.certified > 1:
            code = NoteCode.CERTIFIED
            text = (
                f"certified: {claim}, for {total - kept} of {total} {units} removed; accuracy on the unseen rows fell"
                f" by {self.drops[self.certified - 1]:.4g} (p = {self.p_values[self.certified - 1]:.2g}); {rows}"
            )
        else:
            code = NoteCode.NOT_CERTIFIED
            text = f"nothing was certified, so all {units} are kept: {claim} was requested; {rows}"
        if self.certified < len(kept_units):
            removed = total - kept_units[self.certified]
            text += f"; with {removed} {units} removed it fell by {self.drops[-1]:.4g} (p = {self.p_values[-1]:.2g}), "
            if self.needed_rows is None:
                text += "which more rows like these would not certify"
            else:
                text += f"which about {self.needed_rows} unseen rows like these would certify"
        return Note(code=code, text=f"{text}; {scope}" if self.certified > 1 else text)


def p_value(differences: np.ndarray, budget: float, confidence: float) -> np.ndarray:
    """p-values `[...]` of "the mean difference over the whole population is more than `budget`".

    Args:
        differences: loss after minus loss before of each row, in {-1, 0, 1}, in random order, `[..., rows]`.
        budget: permitted mean difference, from 0 to below 1.
        confidence: the bets are tuned to reach the capital 1 / (1 - confidence); the p-value is valid for any value.
    """
    rows = differences.shape[-1]
    counts = np.arange(1, rows + 1)
    mean = np.cumsum(differences, -1) / (counts + 1)
    variance = (_VARIANCE + np.cumsum((differences - mean) ** 2, -1)) / (counts + 1)
    previous_variance = np.concatenate([np.full_like(variance[..., :1], _VARIANCE), variance[..., :-1]], -1)
    # A bet may depend only on earlier rows. A row loses at most the share 1 - budget of the bet.
    bet = np.minimum(np.sqrt(-2 * math.log(1 - confidence) / (rows * previous_variance)), _STAKE / (1 - budget))
    capital = np.cumsum(np.log1p(bet * (budget - differences)), -1)
    return np.exp(-np.maximum(capital.max(-1), 0.0))


def rows_needed(differences: np.ndarray, budget: float, confidence: float) -> int | None:
    """The smallest number of rows, to about 1%, with which a decision would be certified if rows continued like these.

    None if the mean of `differences` (see `p_value`) reaches the budget, or if more than four million rows are needed.
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
    """Divide rows at random into halves: one for the search, and one, in random order, for the certificate.

    Raises:
        UsageError: the metric is not accuracy, or the budget is not between 0 and 1.
        InputError: there are too few rows to certify even a search that loses nothing.
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
    decisions: Sequence[T], losses: Callable[[T], np.ndarray], budget: float, confidence: float, searched_rows: int
) -> Certificate:
    """Test the decisions of a search in order until one fails; each keeps fewer units than the one before.

    Args:
        losses: of a decision: 1.0 for each unseen row that the model with its units misclassifies, else 0.0, `[rows]`,
            in random order.
    """
    dense = losses(decisions[0])
    drops, p_values, needed, passed = [0.0], [0.0], None, 1
    for decision in decisions[1:]:
        differences = losses(decision) - dense
        drops.append(float(differences.mean()))
        p_values.append(float(p_value(differences, budget, confidence)))
        if p_values[-1] > 1 - confidence:
            needed = rows_needed(differences, budget, confidence)
            break
        passed += 1
    return Certificate(passed, tuple(drops), tuple(p_values), confidence, budget, searched_rows, len(dense), needed)


def check_rows_unseen(data: Data) -> None:
    """Raise InputError if an evaluation row is a training row, by its tokens: searches and models learn from these."""
    overlap = int(np.isin(_digests(data.eval), _digests(data.train)).sum())
    if overlap:
        raise InputError(
            f"--certify: {overlap} of the {len(data.eval)} evaluation rows have the content of training rows, so they "
            f"certify nothing about unseen rows; remove these rows, or name different rows (--eval-data)",
            code=ErrorCode.ROWS_OVERLAP,
            field="eval_data",
            rows=len(data.eval),
            overlap=overlap,
        )


def record_certificate(rows: Dataset, request: Mapping[str, Any]) -> int:
    """Record a certificate, and count the earlier certificates that used some of its rows; an equal one is not counted.

    Args:
        rows: the evaluation rows, those of the search and those of the test.
        request: what else decides the certificate: model, method, seed, ...
    """
    digests, folder = np.unique(_digests(rows)), user_cache() / "certificates"
    key = json.dumps(request, sort_keys=True, default=str).encode() + digests.tobytes()
    path = folder / f"{hashlib.sha256(key).hexdigest()[:16]}.npy"
    earlier = 0
    for stored in folder.glob("*.npy"):
        with contextlib.suppress(OSError, EOFError, ValueError):  # a file that cannot be read
            earlier += stored.name != path.name and bool(np.isin(digests, np.load(stored)).any())
    with contextlib.suppress(OSError):  # a cache that cannot be written must not cost a finished search
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as temporary, temporary.open("wb") as file:
            np.save(file, digests)
    return earlier


def _digests(rows: Dataset) -> np.ndarray:
    """A number for the tokens of each row, uint64 `[rows]`."""
    digests = [
        int.from_bytes(hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()[:8], "little")
        for ids in (rows["input_ids"][:] if len(rows) else ())
    ]
    return np.array(digests, dtype=np.uint64)
