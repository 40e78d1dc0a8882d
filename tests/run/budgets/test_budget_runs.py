"""Runs under a budget: it is met, the law holds, labels are not needed, and bad requests are refused in one line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import compressor
from compressor.config.run import Recipe
from compressor.errors import BudgetError, CompressorError, ErrorCode, InputError, SiteRefusedError, UsageError
from compressor.model_folder import example_inputs, load
from compressor.model_folder.access import access_of
from compressor.model_folder.fingerprints import weight_fingerprints
from compressor.pruning import measure
from compressor.results import NoteCode, Report
from compressor.run.steps.units import fold_gates
from compressor.units import find_groups, gated, keep_all
from graph_passes import Plan
from graph_passes.attention.match_plan import weight_name
from tests import folders
from tests.faults import fails_with
from tests.run.budgets.budget_runs import budget_recipe, codes, run
from tests.run.listeners import RecordingListener, interrupt
from tests.run.runs import learn, learning_recipe
from tests.zoo import FAMILIES


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A file of five rows, of which the four that are not held out have 12 tokens."""
    rows = [f"{number % 2}\tgood" for number in range(5)]
    (tmp_path / "few.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return tmp_path / "few.tsv"


@pytest.mark.parametrize("unit", ["macs", pytest.param("parameters", marks=pytest.mark.zoo)])
def test_a_share_is_met_by_the_graph(inputs: Path, tmp_path: Path, unit: str, request: pytest.FixtureRequest) -> None:
    if unit == "macs":
        share, (_, report) = 0.6, request.getfixturevalue("pruned")
    else:
        share, report = 0.97, run(inputs, tmp_path / "out", parameters="97%")
    assert report.plan.neurons_kept + report.plan.heads_kept < report.plan.neurons + report.plan.heads
    assert report.plan.method == "reconstruct"
    assert NoteCode.BUDGET_MET in codes(report)
    assert all(proof.holds for proof in report.proofs)
    if unit == "parameters":
        assert report.compressed.parameters <= share * report.dense.parameters
    else:
        assert report.compressed.macs is not None
        assert report.dense.macs is not None
        assert report.compressed.macs <= share * report.dense.macs
    (row,) = report.budget
    assert row.unit == unit
    assert row.met
    assert row.predicted == row.reached <= row.requested
    assert row.requested == pytest.approx(share * row.dense)
    assert [cost.type for cost in report.costs] == ["attention", "feed-forward", "rest"]
    after = sum(cost.after for cost in report.costs)
    assert after < sum(cost.before for cost in report.costs)
    assert after == pytest.approx(report.compressed.macs)


def test_the_folder_holds_the_refitted_weights(inputs: Path, pruned: tuple[Path, Report]) -> None:
    out, _ = pruned
    folder, plan = load(out), Plan.load(out / "plan.json")
    batch = example_inputs(folder, 2, 8)
    assert plan.model == folder.fingerprint
    original, fitted = (weight_fingerprints(source.access) for source in (load(inputs / "model"), folder))
    changed = {name for name, record in plan.weights.items() if record.is_changed}
    assert changed == {name for name, values in fitted.items() if values != original[name]}
    assert {weight_name(group) for group in plan.feed_forwards} <= changed
    for name, record in plan.weights.items():
        assert (record.original, record.fitted) == (original[name], fitted[name])
    with torch.no_grad():
        plain = folder.model(**batch).logits
        with gated(folder.model, plan):
            assert torch.allclose(folder.model(**batch).logits, plain, atol=1e-6)


@pytest.mark.zoo
def test_the_folder_is_a_model_with_its_plan(tmp_path: Path, pruned: tuple[Path, Report]) -> None:
    out, plan = pruned[0], Plan.load(pruned[0] / "plan.json")
    again = compressor.compress(
        Recipe(model=out, out=tmp_path / "again", batch=(1,), seq=(8,), seconds=0.01, threads=1)
    )
    assert (again.plan.groups, again.plan.weights) == (plan.groups, plan.weights)


@pytest.mark.zoo
def test_a_speed_is_reached_by_rounds_of_measuring(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_DRIFT", math.inf)  # times of a tiny model vary
    report = run(inputs, tmp_path / "out", latency="1000ms")
    assert {NoteCode.BUDGET_MET, NoteCode.BUDGET_ABOVE_DENSE} <= codes(report)
    assert report.plan.neurons_kept == report.plan.neurons
    later = run(inputs, tmp_path / "later", latency="1000ms")
    assert NoteCode.COSTS_REUSED in codes(later)


@pytest.mark.zoo
@pytest.mark.parametrize(("units", "unchanged"), [("heads", "neurons"), ("neurons", "heads")])
def test_units_of_one_type_are_removed(inputs: Path, tmp_path: Path, units: str, unchanged: str) -> None:
    plan = run(inputs, tmp_path / "out", parameters="90%", prune_units=units).plan
    assert getattr(plan, f"{units}_kept") < getattr(plan, units)
    assert getattr(plan, f"{unchanged}_kept") == getattr(plan, unchanged)


@pytest.mark.zoo
@pytest.mark.parametrize("group_by", ["query", "kv"])
def test_query_heads_are_removed_in_groups(inputs: Path, tmp_path: Path, group_by: str) -> None:
    sizes: dict[str, Any] = {**folders.SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    config = hf.LlamaConfig(**{**sizes, "num_hidden_layers": 2}, pad_token_id=0)
    folders.save(hf.LlamaForSequenceClassification(config), tmp_path / "model")
    fields = {"prune_units": "heads", "group_by": group_by, "model": tmp_path / "model", "method": "reconstruct"}
    report = run(inputs, tmp_path / "out", macs="75%", **fields)
    assert all(proof.holds for proof in report.proofs)
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert plan.heads_kept < plan.heads
    for site in plan.sites:
        counts = [sum(head // 4 == key for head in site.kept) for key in range(2)]
        assert (counts[0] == counts[1]) if group_by == "query" else set(counts) <= {0, 4}


@pytest.mark.zoo
def test_heads_that_share_one_key_value_head_stay_or_go_together(inputs: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**folders.SIZES, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4}
    config = hf.LlamaConfig(**{**sizes, "num_hidden_layers": 2}, pad_token_id=0)
    folders.save(hf.LlamaForSequenceClassification(config), tmp_path / "model")
    report = run(inputs, tmp_path / "out", macs="80%", model=tmp_path / "model", prune_units="heads")
    assert all(proof.holds for proof in report.proofs)
    assert report.plan.heads_kept == 4 == report.plan.heads / 2


@pytest.mark.zoo
def test_a_number_of_heads_is_kept_exactly(inputs: Path, tmp_path: Path) -> None:
    plan = compressor.compress(
        learning_recipe(inputs, tmp_path / "out", method="reconstruct", training_steps=None)
    ).plan
    assert (plan.heads_kept, plan.neurons_kept) == (1, plan.neurons)


@pytest.mark.zoo
@pytest.mark.parametrize("method", ["fisher", "magnitude"])
def test_methods_to_compare_with_leave_the_weights_of_their_plan(inputs: Path, tmp_path: Path, method: str) -> None:
    report = run(inputs, tmp_path / "out", macs="60%", method=method)
    folder, plan = load(tmp_path / "out"), Plan.load(tmp_path / "out" / "plan.json")
    batch = example_inputs(folder, 2, 8)
    with torch.no_grad():
        plain = folder.model(**batch).logits
        with gated(folder.model, plan):
            assert torch.allclose(folder.model(**batch).logits, plain, atol=1e-6)
    assert plan.method == method
    assert NoteCode.BUDGET_MET in codes(report)
    assert all(proof.holds for proof in report.proofs)


@pytest.mark.zoo
@pytest.mark.parametrize("units", ["all", "neurons", "heads"])
def test_the_metric_bounds_what_is_removed(answered: Path, tmp_path: Path, units: str) -> None:
    report = run(answered, tmp_path / "out", max_drop=0.5, prune_units=units)
    assert report.plan.method == "reconstruct"
    assert report.scores[0].compressed >= report.scores[0].dense - 0.5
    speeds: dict[Any, float] = {(speed.batch, speed.seq): speed.ratio for speed in report.speeds}
    assert {(row.batch, row.seq) for row in report.budget} == set(speeds)
    for row in report.budget:
        assert (row.unit, row.requested) == ("ms", None)
        assert row.reached == pytest.approx(row.dense / speeds[row.batch, row.seq])


@pytest.mark.zoo
def test_training_rows_need_no_labels(inputs: Path, tmp_path: Path) -> None:
    rows = (inputs / "rows.tsv").read_text().splitlines()
    unlabelled = tmp_path / "unlabelled.tsv"
    unlabelled.write_text("\n".join(["text", *(row.split("\t")[1] for row in rows[1:]), ""]))
    report = run(inputs, tmp_path / "out", macs="60%", data=str(unlabelled), eval_data=str(inputs / "rows.tsv"))
    assert NoteCode.ROWS_UNLABELLED in codes(report)
    assert report.scores


@pytest.mark.zoo
def test_the_same_run_gives_the_same_plan(inputs: Path, tmp_path: Path) -> None:
    plans = [run(inputs, tmp_path / name, macs="60%").plan for name in ("one", "two")]
    assert plans[0].groups == plans[1].groups
    assert plans[0].model == plans[1].model


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"macs": "0.1%"}, BudgetError, ErrorCode.BUDGET_UNREACHABLE),
        pytest.param({"parameters": "0.1%"}, BudgetError, ErrorCode.BUDGET_UNREACHABLE, marks=pytest.mark.zoo),
        ({"macs": "60%", "data": "few.tsv"}, InputError, ErrorCode.TOO_FEW_ROWS),
        ({"speedup": 2, "budget_at": "3x8"}, UsageError, ErrorCode.CONTRADICTION),
    ],
)
def test_what_cannot_be_met_is_refused_before_statistics_are_gathered(
    inputs: Path,
    few: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    kind: type[CompressorError],
    code: ErrorCode,
) -> None:
    monkeypatch.chdir(few.parent)
    fields = {"eval_data": str(inputs / "rows.tsv"), **fields}
    listener = RecordingListener()
    with pytest.raises(kind) as error:
        compressor.compress(budget_recipe(inputs, tmp_path / "out", **fields), listener)
    assert error.value.code is code
    assert "\n" not in str(error.value)
    assert not any(stage.startswith("gathering statistics") for stage in listener.stages)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"macs": "0.1%"}, BudgetError, ErrorCode.BUDGET_UNREACHABLE),
        pytest.param({"speedup": 2, "data": "few.tsv"}, InputError, ErrorCode.TOO_FEW_ROWS, marks=pytest.mark.zoo),
    ],
)
def test_what_cannot_be_met_is_refused_before_heads_are_learned(
    inputs: Path, few: Path, tmp_path: Path, fields: dict[str, Any], kind: type[CompressorError], code: ErrorCode
) -> None:
    rows = {"data": str(few), "eval_data": str(inputs / "rows.tsv")} if "data" in fields else {}
    listener = RecordingListener("learning which heads", interrupt)
    with fails_with(code, kind):
        compressor.compress(learning_recipe(inputs, tmp_path / "out", method="dsp", **{**fields, **rows}), listener)
    assert not (tmp_path / "out").exists()


def test_a_budget_above_dense_gathers_no_statistics(inputs: Path, tmp_path: Path) -> None:
    learned = learn(budget_recipe(inputs, tmp_path / "out", macs="100%"))
    plan, listener = learned.selected.plan, learned.listener
    assert NoteCode.BUDGET_ABOVE_DENSE in learned.codes
    assert (plan.heads_kept, plan.neurons_kept) == (plan.heads, plan.neurons)
    assert not {"gathering statistics of the rows", "measuring what each group contributes"} & {*listener.stages}


@pytest.mark.zoo
def test_statistics_are_gathered_in_a_stage(inputs: Path, tmp_path: Path) -> None:
    listener = RecordingListener("gathering statistics", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(budget_recipe(inputs, tmp_path / "out", macs="60%"), listener)


@pytest.mark.zoo
def test_a_loss_is_certified_on_rows_that_the_bisection_has_not_seen(answered: Path, tmp_path: Path) -> None:
    report = run(answered, tmp_path / "out", max_drop=0.9, certify=0.5)
    plan = report.plan
    removed = plan.heads - plan.heads_kept + plan.neurons - plan.neurons_kept
    assert (removed > 0) == (NoteCode.CERTIFIED in codes(report))
    assert (removed == 0) == (NoteCode.NOT_CERTIFIED in codes(report))
    assert report.certificate is not None
    assert report.certificate.removed == removed
    assert Report.model_validate_json(report.model_dump_json()).certificate == report.certificate


def test_groups_of_the_tiny_model(inputs: Path) -> None:
    folder = load(inputs / "model")
    groups = find_groups(folder.model, example_inputs(folder, 2, 8))
    assert [group.type for group in groups] == ["heads", "neurons"]


@pytest.mark.parametrize("kept", [True, False])
def test_gates_that_cannot_be_folded_are_refused(kept: bool) -> None:
    """Heads of an attention without a known output projection were removed before."""
    model, inputs = FAMILIES["bert"](0)
    groups = [replace(group, linear=None) for group in find_groups(model, inputs)]
    heads = next(group for group in groups if group.type == "heads")
    plan = keep_all(groups).replace_groups([heads.plan(range(not kept, heads.units))])
    if kept:
        fold_gates(access_of(model), groups, plan)
    else:
        with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, site=heads.name):
            fold_gates(access_of(model), groups, plan)
