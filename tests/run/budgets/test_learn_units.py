"""Runs in which a gate learns heads and neurons within a budget: it is met, proven, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import compressor
from compressor.config.ladder import recipes_of
from compressor.errors import BudgetError, ErrorCode
from compressor.measure.costs import CostTable, GroupCosts
from compressor.model_folder import load
from compressor.pruning.allocate import Constraint
from compressor.results import NoteCode, Report
from compressor.run.ladder import compress_ladder
from compressor.run.steps.units import pool_within
from compressor.units import Bundles, PrunableGroup, keep_all
from graph_passes import Plan
from tests import folders
from tests.run.budgets.budget_runs import bound
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learn, learning_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with 72 neurons each, in bundles of eight."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "model"
    sizes: dict[str, Any] = {**folders.SIZES, "num_hidden_layers": 2, "intermediate_size": 72}
    folders.save(hf.BertForSequenceClassification(hf.BertConfig(**sizes)), path)
    return path


def fields_of(model: Path, **fields: Any) -> dict[str, Any]:
    return {"model": model, "keep": None, "method": "dsp", **fields}


def run(inputs: Path, model: Path, out: Path, **fields: Any) -> Report:
    return compressor.compress(learning_recipe(inputs, out, **fields_of(model, **fields)))


def test_a_gate_learns_units_within_a_budget(inputs: Path, model: Path, tmp_path: Path) -> None:
    learned = learn(learning_recipe(inputs, tmp_path / "out", **fields_of(model, macs="55%")))
    plan = learned.selected.plan
    assert NoteCode.BUDGET_MET in learned.codes
    assert plan.method == "dsp"
    assert plan.heads_kept + plan.neurons_kept < plan.heads + plan.neurons
    assert all(len(group.kept) % 8 == 0 for group in plan.feed_forwards)


@pytest.mark.zoo
@pytest.mark.parametrize(
    "fields",
    [
        {"macs": "55%", "method": "dsp"},
        {"macs": "40%", "method": "hard-concrete"},
        {"macs": "60%", "method": "bin-concrete", "batch": (1, 2)},
        {"parameters": "80%", "method": "ste", "seed": 3},
        {"macs": "70%", "method": "dsp-pipelined", "prune_units": "neurons"},
        {"macs": "80%", "method": "dsp", "prune_units": "heads"},
        {"macs": "55%", "method": "dsp", "distill": True, "distill_steps": 2},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_a_budget_is_met_by_the_graph(inputs: Path, model: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    report = run(inputs, model, tmp_path / "out", **fields)
    assert all(proof.holds for proof in report.proofs)
    assert NoteCode.BUDGET_MET in {note.code for note in report.notes}
    assert report.plan.method == fields["method"]
    for row in report.budget:
        assert row.met
        assert row.predicted == row.reached <= bound(row)
        assert row.reached > 0.7 * bound(row)  # a head is a large part of this model
    if "macs" in fields:
        assert report.compressed.macs is not None
        assert report.dense.macs is not None
        assert report.compressed.macs <= float(fields["macs"].rstrip("%")) / 100 * report.dense.macs
    assert all(len(group.kept) % 8 == 0 for group in report.plan.feed_forwards)
    if (units := fields.get("prune_units")) is not None:
        unchanged = {"heads": "neurons", "neurons": "heads"}[units]
        assert getattr(report.plan, f"{unchanged}_kept") == getattr(report.plan, unchanged)
        assert getattr(report.plan, f"{units}_kept") < getattr(report.plan, units)


@pytest.mark.zoo
def test_heads_that_share_keys_and_values_have_one_gate(inputs: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**folders.SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    config = hf.LlamaConfig(**{**sizes, "num_hidden_layers": 2}, pad_token_id=0)
    folders.save(hf.LlamaForSequenceClassification(config), tmp_path / "model")
    report = run(inputs, tmp_path / "model", tmp_path / "out", macs="60%")
    assert all(proof.holds for proof in report.proofs)
    assert report.plan.heads_kept + report.plan.neurons_kept < report.plan.heads + report.plan.neurons
    for site in report.plan.sites:
        assert {sum(head // 2 == key for head in site.kept) for key in range(4)} <= {0, 2}


@pytest.mark.zoo
def test_an_interrupted_run_learns_the_same(inputs: Path, model: Path, tmp_path: Path) -> None:
    recipe = learning_recipe(inputs, tmp_path / "out", **fields_of(model, macs="55%"))
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe, RecordingListener("compressed: exporting", interrupt))
    listener = RecordingListener()
    resumed = compressor.compress(recipe, listener)
    assert NoteCode.RESUMED in listener.codes
    whole = run(inputs, model, tmp_path / "whole", macs="55%")
    assert resumed.budget == whole.budget
    assert resumed.costs == whole.costs
    assert (tmp_path / "out" / "plan.json").read_bytes() == (tmp_path / "whole" / "plan.json").read_bytes()
    assert load(tmp_path / "out").fingerprint == load(tmp_path / "whole").fingerprint
    again = compressor.compress(
        compressor.Recipe(model=tmp_path / "out", out=tmp_path / "again", batch=(1,), seq=(8,), seconds=0.01, threads=1)
    )
    assert again.plan.groups == Plan.load(tmp_path / "out" / "plan.json").groups


def make_problem(seed: int, neurons: int) -> tuple[list[Bundles], CostTable]:
    """Groups of heads and neurons, and a table of their costs."""
    rng = np.random.default_rng(seed)
    groups = [PrunableGroup(name, "neurons", neurons, 1, 8, name) for name in "ab"]
    costs = rng.integers(1, 100, len(groups))
    rows = tuple(
        GroupCosts(groups=(group.name,), type="neurons", counts=(0, neurons), savings=(float(cost * neurons), 0.0))
        for group, cost in zip(groups, costs, strict=True)
    )
    whole = 500.0 + sum(row.savings[0] for row in rows)
    return [Bundles(group, tuple(rng.permutation(neurons).tolist())) for group in groups], CostTable(
        unit="macs", batch=1, seq=8, dense=whole, whole=whole, rows=rows
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("neurons", [64, 68])
def test_no_plan_of_a_pool_costs_more_than_its_budget(seed: int, neurons: int) -> None:
    bundles, table = make_problem(seed, neurons)
    rng = np.random.default_rng(seed)
    budget = table.least + rng.random() * (table.whole - table.least)
    pool = pool_within(bundles, [Constraint(table, budget)])
    mask = pool.budget.select(torch.from_numpy(rng.normal(size=pool.budget.units)))
    plans = [member.plan(part) for member, part in zip(bundles, mask.double().split(pool.layers), strict=True)]
    plan = keep_all([member.group for member in bundles]).replace_groups(plans)
    cost = table.cost(plan.counts)
    assert cost <= budget * (1 + 1e-9)
    if neurons == 64:  # none is left over
        dropped = torch.tensor(pool.costs[0])[~mask]
        assert not len(dropped) or cost + dropped.min() > budget


def test_a_budget_below_what_is_in_no_bundle_is_refused() -> None:
    bundles, table = make_problem(0, 64)
    with pytest.raises(BudgetError) as error:
        pool_within(bundles, [Constraint(table, 0.9 * table.least)])
    assert error.value.code is ErrorCode.BUDGET_UNREACHABLE
    assert error.value.details["least"] == pytest.approx((table.least,))


@pytest.mark.zoo
@pytest.mark.usefixtures("times_by_macs")
def test_a_gate_keeps_as_many_multiply_accumulates_as_the_rungs_of_a_ladder_by_time(
    inputs: Path, model: Path, tmp_path: Path
) -> None:
    timing: dict[str, Any] = {"batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1, "keep_unread_positions": True}
    learning: dict[str, Any] = {"data": str(inputs / "rows.tsv"), "training_steps": 4, "batch_size": 8, "max_length": 8}
    flags = {**timing, **learning, "speedup": "1.2,1.6", "out": str(tmp_path / "out")}
    recipes = recipes_of(str(model), None, flags)
    frontier = compress_ladder(recipes, tmp_path / "out")
    assert frontier.ended is None
    shares, out = [rung.macs for rung in frontier.rungs], tmp_path / "gate"
    gates = recipes_of(str(model), None, {**timing, **learning, "macs": shares, "method": "dsp", "out": str(out)})
    for rung, gate in zip(frontier.rungs, compress_ladder(gates, out).rungs, strict=True):
        assert rung.macs is not None
        assert gate.macs is not None
        assert 0.8 * rung.macs < gate.macs <= rung.macs
