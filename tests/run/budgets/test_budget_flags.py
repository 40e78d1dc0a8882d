"""What each flag of a budget does to the plan, in short runs whose times are multiply-accumulates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from compressor.results import NoteCode
from graph_passes import Plan
from tests import folders
from tests.run.budgets.budget_runs import bound, budget_recipe
from tests.run.runs import Learned, learn, learning_recipe

pytestmark = pytest.mark.usefixtures("times_by_macs")

TIMED: dict[str, Any] = {"keep_unread_positions": True}
"""Otherwise the whole model is twice as fast before anything is removed."""


def learned(inputs: Path, tmp_path: Path, **fields: Any) -> Learned:
    return learn(budget_recipe(inputs, tmp_path / "out", **fields))


def removed(plan: Plan) -> dict[str, int]:
    return {"heads": plan.heads - plan.heads_kept, "neurons": plan.neurons - plan.neurons_kept}


def test_units_are_removed_until_the_engine_is_fast_enough(
    inputs: Path, tmp_path: Path, times_by_macs: list[tuple[float, float]]
) -> None:
    """The time by the table is that of the engine of the plan."""
    result = learned(inputs, tmp_path, speedup=1.5, **TIMED)
    assert sum(removed(result.selected.plan).values()) > 0
    assert NoteCode.BUDGET_MET in result.codes
    (row,) = result.selected.budget
    assert (row.unit, row.batch, row.seq) == ("ms", 1, 8)
    assert row.requested == pytest.approx(row.dense / 1.5)
    assert times_by_macs
    for predicted, measured in times_by_macs:
        assert measured == pytest.approx(predicted, rel=1e-3)
    assert min(measured for _, measured in times_by_macs) <= bound(row)
    assert {share.unit for share in result.selected.costs} == {"ms", "macs"}


@pytest.mark.zoo
def test_a_latency_bounds_the_sizes_that_are_named(inputs: Path, tmp_path: Path) -> None:
    """The larger size takes twice the time of the smaller one, so that it alone decides where both count."""
    sizes: dict[str, Any] = {"batch": (1, 2), "latency": "0.0155ms", **TIMED}
    small = learned(inputs, tmp_path / "small", **sizes, budget_at=("1x8",)).selected
    both = learned(inputs, tmp_path / "both", **sizes).selected
    assert [(row.batch, row.seq) for row in small.budget] == [(1, 8)]
    assert [(row.batch, row.seq) for row in both.budget] == [(1, 8), (2, 8)]
    for selected in (small, both):
        assert all(row.predicted <= bound(row) for row in selected.budget)
    assert sum(removed(both.plan).values()) > sum(removed(small.plan).values()) > 0


@pytest.mark.parametrize(
    ("method", "units", "unchanged"),
    [
        ("reconstruct", "heads", "neurons"),
        pytest.param("fisher", "neurons", "heads", marks=pytest.mark.zoo),
        pytest.param("magnitude", "heads", "neurons", marks=pytest.mark.zoo),
        pytest.param("reconstruct", "neurons", "heads", marks=pytest.mark.zoo),
        pytest.param("fisher", "heads", "neurons", marks=pytest.mark.zoo),
        pytest.param("magnitude", "neurons", "heads", marks=pytest.mark.zoo),
    ],
)
def test_units_of_one_type_are_removed(inputs: Path, tmp_path: Path, method: str, units: str, unchanged: str) -> None:
    selected = learned(inputs, tmp_path, parameters="90%", prune_units=units, method=method).selected
    assert removed(selected.plan)[units] > 0
    assert removed(selected.plan)[unchanged] == 0
    assert selected.plan.method == method
    assert all(row.predicted <= bound(row) for row in selected.budget)


@pytest.mark.zoo
def test_query_heads_are_removed_alike_from_all_key_value_heads(inputs: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**folders.SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    config = hf.LlamaConfig(**{**sizes, "num_hidden_layers": 1}, pad_token_id=0)
    folders.save(hf.LlamaForSequenceClassification(config), tmp_path / "model")
    fields = {"model": tmp_path / "model", "prune_units": "heads", "group_by": "query", "macs": "80%"}
    (site,) = learned(inputs, tmp_path, **fields).selected.plan.sites
    counts = [sum(head // 4 == key for head in site.kept) for key in range(2)]
    assert 0 < counts[0] == counts[1] < 4


@pytest.mark.zoo
@pytest.mark.parametrize("certify", [None, 0.5])
def test_the_metric_alone_bounds_what_is_removed(answered: Path, tmp_path: Path, certify: float | None) -> None:
    result = learned(answered, tmp_path, max_drop=0.9, method="reconstruct", certify=certify)
    count, certificate = sum(removed(result.selected.plan).values()), result.selected.certificate
    assert count > 0 or certify is not None
    assert (count > 0) == (NoteCode.BUDGET_MET in result.codes)
    assert (count == 0) == (NoteCode.NOTHING_REMOVED in result.codes)
    assert (certificate is None) == (certify is None)
    assert certificate is None or certificate.removed == count
    assert (NoteCode.CERTIFIED in result.codes) == (certificate is not None and count > 0)
    assert NoteCode.NOTHING_REMOVED not in result.codes, "plans hold, whatever the certificate permits"


def test_neurons_are_removed_after_heads_of_a_search(inputs: Path, tmp_path: Path) -> None:
    recipe = learning_recipe(inputs, tmp_path / "out", method="astar", keep=1, training_steps=None, parameters="80%")
    result = learn(recipe)
    assert removed(result.selected.plan)["heads"] == 1
    assert removed(result.selected.plan)["neurons"] > 0
    assert result.selected.plan.method == "astar+reconstruct"
    assert {NoteCode.HEADS_SELECTED_FIRST, NoteCode.BUDGET_MET} <= result.codes
