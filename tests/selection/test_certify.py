"""Certificates: a certified step loses more than its budget no more often than the confidence permits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from scipy.stats import binom

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import CertificateScope, NoteCode
from compressor.selection.certify import Certificate, certify, p_value, record_certificate, rows_needed, split_rows
from compressor.selection.search import Decision, Head
from tests.faults import fails_with
from tests.selection import tiny

SCOPE = CertificateScope(rows="sha256:0123456789abcdef", seed=3)
HEADS: frozenset[Head] = frozenset(("a", head) for head in range(6))
DECISIONS = [Decision(frozenset(("a", head) for head in range(6 - removed)), {}) for removed in range(6)]
"""All heads, then one fewer at a time."""


def draw_differences(drops: list[float], discordant: float, rows: int, sets: int, seed: int) -> np.ndarray:
    """Differences of loss `[sets, steps, rows]`, in -1, 0 and 1.

    Args:
        drops: true drop of each step.
        discordant: share of the rows that a step answers otherwise than the model did before.
        rows: rows of a set.
        sets: number of data sets.
        seed: seed of the draw.
    """
    draw = np.random.default_rng(seed)
    uniform = draw.random((sets, 1, rows))  # every step loses the same rows, as with nested heads
    true = np.array(drops)[:, None]
    share = np.maximum(discordant, np.abs(true))
    return (uniform < (share + true) / 2).astype(float) - (uniform > 1 - (share - true) / 2)


@pytest.mark.parametrize("budget", [0.01, 0.05])
@pytest.mark.parametrize("rows", [300, *(pytest.param(rows, marks=pytest.mark.zoo) for rows in (60, 1000))])
@pytest.mark.parametrize("discordant", [0.0, 0.05, pytest.param(0.3, marks=pytest.mark.zoo)])
@pytest.mark.parametrize(
    "ratios",
    [
        [1.001] * 3,  # none may pass
        [0.5, 1.001, 1.5],  # the first may
        [-0.5, 0.9, 1.0, 1.001, 1.2],
        [2.0, 0.0, 0.0],  # steps after a failure must not count
    ],
)
def test_certified_means_within_the_budget(budget: float, rows: int, discordant: float, ratios: list[float]) -> None:
    """At most 5% of 1,000 drawn data sets certify a step that truly loses more, up to the error of the draw."""
    true = [budget * ratio for ratio in ratios]
    passed = p_value(draw_differences(true, discordant, rows, 1000, seed=rows), budget, 0.95) <= 0.05
    certified = np.cumprod(passed, axis=1).sum(1)
    worst = np.array([0.0, *np.maximum.accumulate(true)])
    wrongly_certified = (worst[certified] > budget).mean()
    assert wrongly_certified <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.parametrize("discordant", [0.02, 0.1, 1.0])
def test_a_drop_of_exactly_the_budget_is_certified_no_more_often_than_permitted(discordant: float) -> None:
    passed = p_value(draw_differences([0.02], discordant, 500, 2000, seed=1), 0.02, 0.9) <= 0.1
    assert passed.mean() <= 0.1 + 3 * np.sqrt(0.09 / 2000)


def test_has_power() -> None:
    """A loss of zero against a budget of two points, with one row in twenty answered otherwise."""
    few, many = (p_value(draw_differences([0.0], 0.05, rows, 300, seed=2), 0.02, 0.95) <= 0.05 for rows in (500, 3000))
    assert few.mean() < many.mean()
    assert many.mean() > 0.9
    assert p_value(np.zeros(400), 0.01, 0.95) <= 0.05


def hoeffding_bentkus(differences: np.ndarray, budget: float) -> np.ndarray:
    """The p-value of Bates et al. 2021 (section 3.1) for differences scaled to [0, 1]."""
    rows, bound = differences.shape[-1], (1 + budget) / 2
    mean = (1 + differences.mean(-1)) / 2
    low = np.minimum(mean, bound)
    hoeffding = np.exp(-rows * (low * np.log(low / bound) + (1 - low) * np.log((1 - low) / (1 - bound))))
    return np.minimum(hoeffding, np.e * binom.cdf(np.ceil(rows * mean - 1e-9), rows, bound))


@pytest.mark.parametrize("rows", [400, 2000, 5000])
@pytest.mark.parametrize("budget", [0.01, 0.05])
@pytest.mark.parametrize("discordant", [0.0, 0.05, 0.2])
def test_betting_has_at_least_the_power_of_hoeffding_bentkus(rows: int, budget: float, discordant: float) -> None:
    differences = draw_differences([0.0], discordant, rows, 200, seed=3)[:, 0]
    betting = (p_value(differences, budget, 0.95) <= 0.05).mean()
    assert betting >= (hoeffding_bentkus(differences, budget) <= 0.05).mean()


def test_p_values_follow_the_capital_of_sequential_bets() -> None:
    differences = np.array([0.0, 1.0, -1.0, 0.0])
    capital = []
    current, total, squares = 1.0, 0.0, 0.1
    for row, value in enumerate(differences):
        bet = min(np.sqrt(2 * np.log(20) / (4 * (squares / (row + 1)))), 0.95 / 0.9)
        current *= 1 + bet * (0.1 - value)
        capital.append(current)
        total += value
        squares += (value - total / (row + 2)) ** 2
    assert p_value(differences, 0.1, 0.95) == pytest.approx(1 / max(1.0, *capital))


def test_the_needed_rows_are_the_minimum_that_passes() -> None:
    needed = rows_needed(np.zeros(1), 0.01, 0.95)
    assert needed is not None
    assert p_value(np.zeros(needed), 0.01, 0.95) <= 0.05 < p_value(np.zeros(int(needed / 1.03)), 0.01, 0.95)
    assert rows_needed(np.array([1.0, 0.0]), 0.5, 0.95) is None


def certify_drops(drops: list[float], rows: int) -> tuple[Certificate, int]:
    """A certificate for steps with these drops of accuracy on the unseen rows, and the number of steps evaluated."""
    order = np.random.default_rng(0).permutation(rows)
    evaluated: list[Decision] = []

    def losses(decision: Decision) -> np.ndarray:
        evaluated.append(decision)
        share = 0.1 + [0.0, *drops][DECISIONS.index(decision)]
        return (order < share * rows).astype(float)

    certificate = certify(DECISIONS[: len(drops) + 1], losses, 0.02, 0.95, 100)
    return certificate, len(evaluated)


def test_testing_stops_at_the_first_step_that_fails() -> None:
    certificate, evaluated = certify_drops([0.0, 0.001, 0.03, 0.0], 2000)
    assert (certificate.certified, evaluated) == (3, 4)
    assert certificate.drops == pytest.approx((0.0, 0.0, 0.001, 0.03))
    assert certificate.needed_rows is None
    assert (certificate.searched_rows, certificate.unseen_rows) == (100, 2000)
    assert (certificate.budget, certificate.confidence) == (0.02, 0.95)
    assert certificate.p_values[2] <= 0.05 < certificate.p_values[3]


def test_as_many_rows_as_needed_certify() -> None:
    certificate, _ = certify_drops([0.01], 500)
    assert certificate.certified == 1
    assert certificate.needed_rows is not None
    certificate, _ = certify_drops([0.01], round(1.2 * certificate.needed_rows))
    assert certificate.certified == 2


def test_notes_say_what_is_certified() -> None:
    certificate, _ = certify_drops([0.0, 0.001, 0.03, 0.0], 2000)
    kept = [len(step.kept) for step in DECISIONS[:5]]
    note = certificate.note(kept, SCOPE)
    assert note.code is NoteCode.CERTIFIED
    passed, failed = (f"{p_value:.2g}" for p_value in certificate.p_values[2:])
    numbers = ("0.02", "95%", "2 of 6 heads", f"0.001 (p = {passed})", "100", "2000", "3 heads", f"0.03 (p = {failed})")
    positions = [note.text.find(number) for number in numbers]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert note.text.endswith(str(SCOPE))
    certificate, _ = certify_drops([0.01], 500)
    note = certificate.note([len(step.kept) for step in DECISIONS[:2]], SCOPE)
    assert note.code is NoteCode.NOT_CERTIFIED
    assert f" {certificate.needed_rows} " in note.text
    certificate, _ = certify_drops([], 500)
    assert certificate.note([len(step.kept) for step in DECISIONS[:1]], SCOPE).code is NoteCode.NOT_CERTIFIED


def test_the_result_holds_what_is_certified_and_what_for() -> None:
    certificate, _ = certify_drops([0.0, 0.001, 0.03, 0.0], 2000)
    result = certificate.result([len(step.kept) for step in DECISIONS[:5]], SCOPE, "heads")
    assert (result.removed, result.total, result.units) == (2, 6, "heads")
    assert (result.max_drop, result.confidence) == (0.02, 0.95)
    assert (result.drop, result.p_value) == (certificate.drops[2], certificate.p_values[2])
    assert (result.searched_rows, result.unseen_rows, result.scope) == (100, 2000, SCOPE)
    nothing, _ = certify_drops([0.5], 500)
    assert nothing.result([6, 5], SCOPE).removed == 0


def test_the_parts_share_no_row_and_depend_on_the_seed() -> None:
    rows = Dataset.from_dict({"row": list(range(1001))})
    searched, unseen = split_rows(rows, tiny.Sign(), 0.02, 0.95, seed=0)
    assert (len(searched), len(unseen)) == (501, 500)
    assert sorted([*searched["row"], *unseen["row"]]) == list(range(1001))
    assert list(split_rows(rows, tiny.Sign(), 0.02, 0.95, seed=0)[1]["row"]) == list(unseen["row"])
    assert list(split_rows(rows, tiny.Sign(), 0.02, 0.95, seed=1)[1]["row"]) != list(unseen["row"])


def test_certificates_that_cannot_be_read_count_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    assert record_certificate(rows, {"seed": 0}) == 0
    (folder,) = tmp_path.rglob("certificates")
    (folder / "empty.npy").touch()
    (folder / "text.npy").write_text("no array")
    (folder / "folder.npy").mkdir()
    assert [record_certificate(rows, {"seed": seed}) for seed in (0, 1)] == [0, 1]


def test_too_few_rows_are_refused() -> None:
    rows = Dataset.from_dict({"row": list(range(100))})
    with fails_with(ErrorCode.TOO_FEW_ROWS, InputError, rows=100) as caught:
        split_rows(rows, tiny.Sign(), 0.01, 0.95, 0)
    enough = Dataset.from_dict({"row": list(range(caught.value.details["minimum"]))})
    assert len(split_rows(enough, tiny.Sign(), 0.01, 0.95, 0)[0]) > 100


def test_a_metric_that_is_not_a_share_of_rows_is_refused() -> None:
    rows = Dataset.from_dict({"row": list(range(100))})
    with fails_with(ErrorCode.UNSUPPORTED, UsageError, field="certify", metric="loss", task="causal-lm"):
        split_rows(rows, tiny.NextToken(), 0.1, 0.95, 0)


@pytest.mark.parametrize("budget", [0.0, 1.0, 2.0])
def test_a_budget_that_is_not_a_share_is_refused(budget: float) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="max_drop", value=budget):
        split_rows(Dataset.from_dict({"row": list(range(100))}), tiny.Sign(), budget, 0.95, 0)
