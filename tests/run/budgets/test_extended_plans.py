"""A run on the output folder of an earlier run removes more units, and is compared with the first model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compressor.results import NoteCode, Report
from graph_passes import Plan
from tests.run.budgets.budget_runs import bound, codes, run
from tests.run.distillation.distilled_runs import have_same_weights, weights


@pytest.fixture(scope="module")
def pruned(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """The output folder of a run under a budget, and its report."""
    out = tmp_path_factory.mktemp("pruned") / "out"
    return out, run(inputs, out, macs="80%")


def assert_removes_more(out: Path, report: Report, earlier: Path) -> None:
    before, after = (Plan.load(folder / "plan.json") for folder in (earlier, out))
    kept = {group.name: set(group.kept) for group in before.groups}
    assert all(set(group.kept) <= kept[group.name] for group in after.groups)
    assert sum(after.counts.values()) < sum(before.counts.values())
    assert all(proof.holds for proof in report.proofs)
    assert {NoteCode.PLAN_FOLLOWED, NoteCode.DENSE_CHOSEN, NoteCode.BUDGET_MET} <= codes(report)


@pytest.mark.zoo
def test_the_result_is_compared_with_the_model_that_the_first_run_began_with(inputs: Path, tmp_path: Path) -> None:
    earlier_out = tmp_path / "earlier"
    earlier = run(inputs, earlier_out, macs="90%")
    report = run(inputs, tmp_path / "out", model=earlier_out, macs="50%")
    assert_removes_more(tmp_path / "out", report, earlier_out)
    assert all(row.met for row in report.budget)
    assert report.dense.macs == earlier.dense.macs
    assert [score.dense for score in report.scores] == [score.dense for score in earlier.scores]
    assert report.recipe["model"] == str(inputs / "model")
    started = run(inputs, tmp_path / "started", macs="50%", start_from=earlier_out)
    assert have_same_weights(weights(tmp_path / "out"), weights(tmp_path / "started"))
    assert report.graphs["model.onnx"] == started.graphs["model.onnx"]


@pytest.mark.zoo
def test_without_that_model_the_result_is_compared_with_what_the_plan_keeps(
    inputs: Path, tmp_path: Path, pruned: tuple[Path, Report], times_by_macs: list[tuple[float, float]]
) -> None:
    earlier_out, earlier = pruned
    alone = shutil.copytree(earlier_out, tmp_path / "alone")
    (alone / "report.json").unlink()
    report = run(
        inputs, tmp_path / "out", model=alone, speedup=3.4
    )  # the plan and rewrites alone are 3.1 times as fast
    assert_removes_more(tmp_path / "out", report, earlier_out)
    assert [score.dense for score in report.scores] == [score.compressed for score in earlier.scores]
    assert report.dense.macs is not None
    assert earlier.dense.macs is not None
    assert report.dense.macs < earlier.dense.macs
    (predicted, _), *_ = times_by_macs
    assert predicted <= bound(report.budget[0]) == pytest.approx(report.dense.macs * 1e-6 / 3.4)
