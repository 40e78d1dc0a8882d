"""Two processes of `accelerate launch` on the CPU: they agree, and what they share is what one process computes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.report import load as load_report
from compressor.report.frontier import FRONTIER_HTML, FRONTIER_JSON, Frontier
from compressor.training.checkpoints import newest_checkpoint
from compressor.training.train import FILE_NAME
from graph_passes import Plan
from tests import language
from tests.block_masks.collecting_process import collect_together
from tests.launch import finish, launch, start
from tests.run.runs import write_inputs
from tests.training.distillation_process import values_of
from tests.training.processes import PARTS
from tests.training.runs import train_model

pytestmark = pytest.mark.zoo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both processes."""
    folder = tmp_path_factory.mktemp("processes")
    for name in PARTS:
        (folder / name).mkdir()
    write_inputs(folder / "distillation")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    """The results of both processes, by part."""
    return launch("tests.training.processes", folder)


@pytest.mark.parametrize("part", PARTS)
def test_both_processes_have_the_same_result(part: str, ranks: list[Any]) -> None:
    assert ranks[0][part] == ranks[1][part]


def test_gates_learn_in_both_processes(ranks: list[Any]) -> None:
    results = ranks[0]["learning"]
    assert results["processes"] == {"count": 2}
    assert [sum(map(len, results[method]["kept"])) for method in ("dsp", "hard-concrete")] == [3, 3]


def test_each_process_reads_its_own_streams(ranks: list[Any], tmp_path: Path) -> None:
    folder = language.folder(**language.UNDROPPED)
    log = train_model(folder, language.data(tmp_path, folder), language.schedule(batch_size=4), tmp_path / "alone")
    results = ranks[0]["streams"]
    perplexities = [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry]
    assert results["perplexity"] == pytest.approx(perplexities, rel=1e-3)
    norm = sum(float(weight.detach().double().norm()) for weight in folder.model.parameters())
    assert results["norm"] == pytest.approx(norm, rel=1e-4)
    # Gates trained with the model, interrupted between checkpoints: each process restores its own memories.
    assert results["memories"] == ["memory_0.safetensors", "memory_1.safetensors"]
    assert results["resumed"] == results["whole"]
    assert sum(results["whole"]["kept"]) == 3


def test_a_distillation_learns_as_one_process_with_twice_the_batch(ranks: list[Any], folder: Path) -> None:
    alone, together = values_of(folder / "distillation", "alone", 8), ranks[0]["distillation"]
    assert together["processes"] == 2
    # The error of hidden states is relative to the rows of a process.
    assert together["losses"] == pytest.approx(alone["losses"], rel=0.03)
    assert together["divergences"] == pytest.approx(alone["divergences"], rel=0.03)


def test_maps_are_those_of_one_process(ranks: list[Any], tmp_path: Path) -> None:
    """This also holds with fewer rows than processes."""
    alone, together = collect_together(tmp_path), ranks[0]["maps"]
    assert together.keys() == alone.keys()
    for name, sites in alone.items():
        for site, (maps, counts) in sites.items():
            np.testing.assert_allclose(together[name][site][0], maps, atol=1e-6)
            assert together[name][site][1] == counts


def test_a_command_of_two_processes_delivers_one_run_within_its_budget(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    budget = "--method dsp --macs 60% --training-steps 2 --batch-size 4"
    sizes = "--max-length 8 --batch 1 --seq 8 --seconds 0.01"
    paths = [str(tmp_path / "model"), "--data", str(tmp_path / "rows.tsv"), "-o", str(tmp_path / "out")]
    finish(start("compressor.cli", *paths, *budget.split(), *sizes.split()))
    report, plan = load_report(tmp_path / "out"), Plan.load(tmp_path / "out" / "plan.json")
    assert [row.met for row in report.budget] == [True]
    assert report.proofs
    assert all(proof.holds for proof in report.proofs)
    assert plan.method == "dsp"
    assert plan.heads_kept + plan.neurons_kept < plan.heads + plan.neurons
    assert max(point.step for point in report.curves) == 2
    assert not (tmp_path / "out.partial").exists()


def test_a_ladder_of_two_processes_delivers_its_rungs(tmp_path: Path) -> None:
    """A budget that nothing meets ends it in both; the rungs before stay, and are not run again."""
    write_inputs(tmp_path)
    words = "--distill --distill-steps 2 --batch-size 4 --max-length 8 --batch 1 --seq 8 --seconds 0.01".split()
    paths = [str(tmp_path / "model"), "--data", str(tmp_path / "rows.tsv"), "-o", str(tmp_path / "out")]
    for values in ("90%,80%,1%", "90%,80%"):
        finish(start("compressor.cli", *paths, *words, "--macs", values))
    frontier = Frontier.model_validate_json((tmp_path / "out" / FRONTIER_JSON).read_text())
    assert [rung.name for rung in frontier.rungs] == ["macs-90", "macs-80"]
    assert frontier.ended is None
    reports = [load_report(tmp_path / "out" / rung.folder) for rung in frontier.rungs]
    assert all(proof.holds for report in reports for proof in report.proofs)
    assert all(row.met for report in reports for row in report.budget)
    assert all(len(report.curves) > 0 for report in reports)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"macs-90", "macs-80", FRONTIER_JSON, FRONTIER_HTML}


def test_a_ladder_of_a_gate_ends_in_both_processes(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words = "--method dsp --training-steps 2 --batch-size 4 --max-length 8 --batch 1 --seq 8 --seconds 0.01".split()
    paths = [str(tmp_path / "model"), "--data", str(tmp_path / "rows.tsv"), "-o", str(tmp_path / "out")]
    finish(start("compressor.cli", *paths, *words, "--macs", "90%,1%"))
    frontier = Frontier.model_validate_json((tmp_path / "out" / FRONTIER_JSON).read_text())
    assert [rung.name for rung in frontier.rungs] == ["macs-90"]
    assert frontier.ended is not None


def test_an_interrupted_command_of_two_processes_resumes_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(60))
    sizes = "--layers 2 --hidden 16 --heads 4 --persistent 8 --memory 8 --segment 6 --batch-size 2"

    def train(name: str) -> list[str]:
        paths = [str(tmp_path / name), "--data", str(tmp_path / "train.txt")]
        return ["compressor.cli", "train", *paths, *sizes.split(), "--steps", "150", "--evaluations", "50"]

    finish(start(*train("whole")))
    process = start(*train("halved"))
    checkpoints = tmp_path / "halved.partial" / "learning" / "checkpoints"
    while not any(checkpoints.glob("checkpoint-9*")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    process.communicate()
    assert newest_checkpoint(checkpoints, 2) is not None
    assert not (tmp_path / "halved").exists()
    finish(start(*train("halved")))
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert (whole / "model.safetensors").read_bytes() == (halved / "model.safetensors").read_bytes()
    results = [json.loads((folder / FILE_NAME).read_text())["result"] for folder in (whole, halved)]
    assert results[0] == results[1]
