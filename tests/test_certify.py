"""The guarantee: a plan that is certified loses more than it may no more often than was agreed, and says what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from scipy.stats import binom

from compressor.errors import InputError, UsageError
from compressor.selection.certify import Certificate, certify, divide, p_value, rows_needed
from compressor.selection.search import Head, Step
from tests import learning

HEADS: frozenset[Head] = frozenset(("a", head) for head in range(6))
STEPS = [Step(frozenset(("a", head) for head in range(6 - gone)), {}) for gone in range(6)]


def drawn(drops: list[float], discordant: float, rows: int, sets: int, seed: int) -> np.ndarray:
    """Differences of loss `[sets, steps, rows]`; of the rows of a step a share is answered otherwise than before."""
    draw = np.random.default_rng(seed)
    uniform = draw.random((sets, 1, rows))  # the same rows are lost by every step, as with nested heads
    true = np.array(drops)[:, None]
    share = np.maximum(discordant, np.abs(true))
    return (uniform < (share + true) / 2).astype(float) - (uniform > 1 - (share - true) / 2)


@pytest.mark.parametrize("budget", [0.01, 0.05])
@pytest.mark.parametrize("rows", [60, 300, 1000])
@pytest.mark.parametrize("discordant", [0.0, 0.05, 0.3])
@pytest.mark.parametrize(
    "over",
    [
        [1.001] * 3,  # none may pass
        [0.5, 1.001, 1.5],  # the first may
        [-0.5, 0.9, 1.0, 1.001, 1.2],
        [2.0, 0.0, 0.0],  # what follows a failure must not count
    ],
)
def test_certified_means_within_the_budget(budget: float, rows: int, discordant: float, over: list[float]) -> None:
    """Of 1,000 drawn data sets at most 5% certify a step that truly costs more, with the drawing's own error."""
    true = [budget * part for part in over]
    passed = p_value(drawn(true, discordant, rows, 1000, seed=rows), budget, 0.95) <= 0.05
    certified = np.cumprod(passed, axis=1).sum(1)
    worst = np.array([0.0, *np.maximum.accumulate(true)])
    wrong = (worst[certified] > budget).mean()
    assert wrong <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.parametrize("discordant", [0.02, 0.1, 1.0])
def test_a_drop_of_just_the_budget_is_rejected_no_more_than_agreed(discordant: float) -> None:
    passed = p_value(drawn([0.02], discordant, 500, 2000, seed=1), 0.02, 0.9) <= 0.1
    assert passed.mean() <= 0.1 + 3 * np.sqrt(0.09 / 2000)


def test_has_power() -> None:
    """Half a point allowed more than is lost, one row in twenty answered otherwise."""
    few, many = (p_value(drawn([0.0], 0.05, rows, 300, seed=2), 0.02, 0.95) <= 0.05 for rows in (500, 3000))
    assert few.mean() < many.mean()
    assert many.mean() > 0.9
    assert p_value(np.zeros(400), 0.01, 0.95) <= 0.05


def hoeffding_bentkus(differences: np.ndarray, budget: float) -> np.ndarray:
    """The p-value of Bates et al. 2021 (section 3.1) of the differences brought to [0, 1]."""
    rows, at = differences.shape[-1], (1 + budget) / 2
    mean = (1 + differences.mean(-1)) / 2
    low = np.minimum(mean, at)
    hoeffding = np.exp(-rows * (low * np.log(low / at) + (1 - low) * np.log((1 - low) / (1 - at))))
    return np.minimum(hoeffding, np.e * binom.cdf(np.ceil(rows * mean - 1e-9), rows, at))


@pytest.mark.parametrize("rows", [400, 2000, 5000])
@pytest.mark.parametrize("budget", [0.01, 0.05])
@pytest.mark.parametrize("discordant", [0.0, 0.05, 0.2])
def test_betting_has_at_least_the_power_of_hoeffding_bentkus(rows: int, budget: float, discordant: float) -> None:
    differences = drawn([0.0], discordant, rows, 200, seed=3)[:, 0]
    betting = (p_value(differences, budget, 0.95) <= 0.05).mean()
    assert betting >= (hoeffding_bentkus(differences, budget) <= 0.05).mean()


def test_p_values_are_of_one_row_after_another() -> None:
    differences = np.array([0.0, 1.0, -1.0, 0.0])
    capital = []
    now, total, spread = 1.0, 0.0, 0.1
    for seen, value in enumerate(differences):
        bet = min(np.sqrt(2 * np.log(20) / (4 * (spread / (seen + 1 if seen else 1)))), 0.95 / 0.9)
        now *= 1 + bet * (0.1 - value)
        capital.append(now)
        total += value
        spread += (value - total / (seen + 2)) ** 2
    assert p_value(differences, 0.1, 0.95) == pytest.approx(1 / max(1.0, *capital))


def test_the_rows_needed_are_the_least_that_pass() -> None:
    needed = rows_needed(np.zeros(1), 0.01, 0.95)
    assert needed is not None
    assert p_value(np.zeros(needed), 0.01, 0.95) <= 0.05 < p_value(np.zeros(int(needed / 1.03)), 0.01, 0.95)
    assert rows_needed(np.array([1.0, 0.0]), 0.5, 0.95) is None


def losses_of(drops: list[float], rows: int) -> dict[frozenset[Head], np.ndarray]:
    shares = [0.1, *(0.1 + drop for drop in drops)]
    order = np.random.default_rng(0).permutation(rows)
    return {step.kept: (order < share * rows).astype(float) for step, share in zip(STEPS, shares, strict=False)}


def certified(drops: list[float], rows: int) -> tuple[Certificate, list[frozenset[Head]]]:
    table, asked = losses_of(drops, rows), []

    def losses(step: Step) -> np.ndarray:
        asked.append(step.kept)
        return table[step.kept]

    return certify(STEPS[: len(drops) + 1], losses, 0.02, 0.95, 100), asked


def test_stops_at_the_first_step_that_fails() -> None:
    found, asked = certified([0.0, 0.001, 0.03, 0.0], 2000)
    assert found.steps == 3
    assert len(asked) == 4
    assert found.drops == pytest.approx((0.0, 0.0, 0.001, 0.03))
    assert found.needed is None
    assert found.note(STEPS[:5]).startswith(
        "certified: a drop of at most 0.02 with 95% confidence, for 2 of 6 heads removed; on the unseen rows accuracy"
        " fell by 0.001 (p = "
    )
    assert "the search saw 100 evaluation rows, the test 2000 others" in found.note(STEPS[:5])
    assert found.note(STEPS[:5]).endswith("which more rows like these would not certify")


def test_says_how_many_rows_it_would_take() -> None:
    found, _ = certified([0.01], 500)
    assert found.steps == 1
    assert found.needed is not None
    assert found.note(STEPS[:2]).startswith("nothing was certified, every head stays")
    assert found.note(STEPS[:2]).endswith(f"which about {found.needed} unseen rows like these would certify")
    more, _ = certified([0.01], round(1.2 * found.needed))
    assert more.steps == 2


def test_a_search_certifies_on_rows_that_it_has_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = replace(learning.data(), eval=learning.rows(601, 3))
    monkeypatch.setattr(learning, "data", lambda task=None: data)
    asked = learning.Recipe(method="taylor", keep=None, max_drop=0.2, guarantee=0.9)
    runs = [learning.run(tmp_path, asked) for _ in range(2)]
    assert runs[0].plan == runs[1].plan
    note, cost = runs[0].notes
    assert note.startswith("certified: a drop of at most 0.2 with 90% confidence, for ")
    assert "the search saw 301 evaluation rows, the test 300 others" in note
    # All heads, and one subset fewer for each head that went, and the one that failed where one did.
    tested = 1 + 8 - runs[0].plan.heads_kept + ("removed fell by" in note)
    assert cost.startswith(f"certifying took {tested} evaluations, ")
    assert runs[0].curves[-1].values["heads"] == runs[0].plan.heads_kept < 8
    with pytest.raises(InputError, match="601 evaluation rows: half of them certify"):
        learning.run(tmp_path, replace(asked, max_drop=0.001))


def test_the_parts_share_no_row_and_come_from_the_seed() -> None:
    rows = Dataset.from_dict({"row": list(range(1001))})
    searched, unseen = divide(rows, learning.Sign(), 0.02, 0.95, seed=0)
    assert (len(searched), len(unseen)) == (501, 500)
    assert sorted([*searched["row"], *unseen["row"]]) == list(range(1001))
    assert list(divide(rows, learning.Sign(), 0.02, 0.95, seed=0)[1]["row"]) == list(unseen["row"])
    assert list(divide(rows, learning.Sign(), 0.02, 0.95, seed=1)[1]["row"]) != list(unseen["row"])


def test_refuses_what_cannot_be_certified() -> None:
    rows = Dataset.from_dict({"row": list(range(100))})
    with pytest.raises(InputError, match=r"100 evaluation rows: half of them certify a drop of at most 0.01 with 95%"):
        divide(rows, learning.Sign(), 0.01, 0.95, 0)
    with pytest.raises(UsageError, match="not the loss of causal-lm"):
        divide(rows, learning.NextToken(), 0.1, 0.95, 0)
    for budget in (0.0, 1.0, 2.0):
        with pytest.raises(UsageError, match="needs a share of accuracy above 0 and below 1"):
            divide(rows, learning.Sign(), budget, 0.95, 0)
