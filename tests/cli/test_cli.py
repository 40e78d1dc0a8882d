"""The command line: verbs, common flags anywhere, results on stdout, the rest on stderr."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, load
from compressor.report import write
from compressor.units import find_sites, keep_all
from graph_passes import BlockMask, Plan
from tests import folders
from tests.command import compress
from tests.report import reports

Cap = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.save(folders.bert(), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def graph(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph with every head, and beside it a plan that drops the first."""
    from compressor.export import export_reference

    path = tmp_path_factory.mktemp("graph") / "dense.onnx"
    folder = load(model)
    inputs = example_inputs(folder, 2, 8)
    plan = keep_all(find_sites(folder.model, inputs))
    export_reference(folder.model, plan, inputs, path)
    dropping_first(plan).save(path.with_name("plan.json"))
    return path


def dropping_first(plan: Plan) -> Plan:
    sites = tuple(
        type(site)(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, tuple(range(1, site.heads)))
        for site in plan.sites
    )
    return plan.model_copy(update={"sites": sites})


def test_help_names_the_verbs_in_order(capfd: Cap) -> None:
    done = compress(capfd, "--help")
    assert (done.code, done.err) == (0, "")
    assert re.findall(r"^  (\w[\w-]*)\*? {2,}\w", done.out, re.MULTILINE) == [
        "run",
        "sites",
        "apply",
        "build",
        "bench",
        "check",
        "report",
        "study",
        "train",
        "export-triton",
        "kernel",
        "recipe",
    ]
    assert compress(capfd).out == done.out


def test_run_is_the_default_verb(capfd: Cap) -> None:
    for words in (
        ["nowhere/"],
        ["run", "nowhere/"],
        ["--target", "ort", "nowhere/"],
        ["--json", "--seed", "3", "nowhere/"],
    ):
        done = compress(capfd, *words, "--quiet")
        assert (done.code, done.out) == (3, "")
        assert done.error == "nowhere: no such folder; give the folder that save_pretrained wrote"


def test_a_misspelt_verb_is_recognised(capfd: Cap) -> None:
    done = compress(capfd, "site", "model/")
    assert done.code == 2
    assert "did you mean sites?" in done.error


@pytest.mark.parametrize("words", [["--json", "sites"], ["sites", "--json"]])
def test_common_flags_stand_anywhere(capfd: Cap, model: Path, words: list[str]) -> None:
    done = compress(capfd, *words, model, "--quiet")
    assert (done.code, done.err) == (0, "")
    name = "bert.encoder.layer.0.attention.self"
    assert done.json == [{"name": name, "kind": "bidirectional", "heads": 2, "kv_heads": 2, "head_dim": 8}]


def test_sites_of_a_folder_and_of_its_graph_agree(capfd: Cap, model: Path, graph: Path) -> None:
    of_folder = compress(capfd, "sites", model)
    of_graph = compress(capfd, "sites", graph)
    assert of_folder.out == of_graph.out
    assert of_folder.out.split()[:5] == ["name", "kind", "heads", "kv_heads", "head_dim"]
    assert of_folder.err.startswith("finding attention")


def test_apply_shrinks_a_graph(capfd: Cap, graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.onnx"
    done = compress(capfd, "apply", graph, "--plan", graph.with_name("plan.json"), "-o", out, "--json")
    assert done.code == 0
    assert (done.json["heads"], done.json["kept"]) == (2, 1)
    assert [row["heads"] for row in compress(capfd, "sites", "--json", out).json] == [1]
    again = compress(capfd, "apply", graph, "--plan", graph.with_name("plan.json"), "-o", out)
    assert again.code == 2
    assert again.error_code == ErrorCode.OUTPUT_EXISTS
    assert str(out) in again.error


def test_apply_tells_what_became_of_masks(capfd: Cap, model: Path, tmp_path: Path) -> None:
    from compressor.export import export_reference

    folder = load(model)
    inputs = example_inputs(folder, 2, 8)
    plan = keep_all(find_sites(folder.model, inputs))
    kept = np.ones((plan.sites[0].heads, 2, 2), np.bool_)
    kept[:, 0, 1] = False
    masked = {1: plan.masked({plan.sites[0].name: BlockMask(kept[:, :1, :1], 1)})}  # single entries stay dense
    masked[8] = plan.masked({plan.sites[0].name: BlockMask(kept, 8)})
    for block, wanted in masked.items():
        reference, out = tmp_path / f"{block}.onnx", tmp_path / f"{block}-small.onnx"
        export_reference(folder.model, wanted, inputs, reference)
        wanted.save(tmp_path / f"{block}.json")
        done = compress(capfd, "apply", reference, "--plan", tmp_path / f"{block}.json", "-o", out, "--json")
        assert done.code == 0, done.err
        lowered = [plan.sites[0].name] if block == 8 else []
        assert done.json["block_sparse"] == lowered
        assert ("stays dense under its mask" in done.err) is (not lowered)
        of_folder = compress(capfd, "sites", "--json", model).json
        for each in (reference, out):  # under its mask, or lowered to the mask's blocks
            assert compress(capfd, "sites", "--json", each).json == of_folder


def test_bench_times_two_graphs(capfd: Cap, graph: Path) -> None:
    done = compress(
        capfd, "bench", graph, graph, "--batch", "1,2", "--seq", "8", "--seconds", "0.01", "--json", "--quiet"
    )
    assert (done.code, done.err) == (0, "")
    assert [(row["batch"], row["seq"]) for row in done.json["speeds"]] == [(1, 8), (2, 8)]
    bad = compress(capfd, "bench", graph, graph, "--batch", "0")
    assert (bad.code, bad.error_code) == (2, ErrorCode.OUT_OF_RANGE)
    assert "--batch '0'" in bad.error


def test_report_is_written_anew(capfd: Cap, tmp_path: Path) -> None:
    report = reports.report()
    write(report, tmp_path)
    (tmp_path / "report.html").unlink()
    done = compress(capfd, "report", tmp_path)
    assert (done.code, report.verdict[:40] in " ".join(done.out.split())) == (0, True)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert compress(capfd, "report", tmp_path, "--quiet").out.strip() == report.verdict
    assert compress(capfd, "report", tmp_path, "--json").json == report.model_dump(mode="json")


def test_debug_shows_where(capfd: Cap) -> None:
    done = compress(capfd, "nowhere/", "--debug", "--quiet")
    assert done.err.startswith("Traceback (most recent call last)")
    assert done.err.splitlines()[-1].startswith("compress: nowhere: no such folder")


def test_an_unknown_option_and_its_neighbour(capfd: Cap) -> None:
    assert compress(capfd, "model/", "--bogus").error == "no such option: --bogus. Try 'compress run --help'."
    near = compress(capfd, "model/", "--eval-dta", "x")
    assert near.error == "no such option: --eval-dta, did you mean --eval-data? Try 'compress run --help'."


def test_neither_a_verb_nor_two_folders(capfd: Cap) -> None:
    done = compress(capfd, "frobnicate", "x")
    assert done.code == 2
    assert "frobnicate" in done.error
    assert "run, sites" in done.error


def test_the_table_of_bench_names_its_columns(capfd: Cap, graph: Path) -> None:
    done = compress(capfd, "bench", graph, graph, "--batch", "1", "--seq", "8", "--seconds", "0.01")
    assert done.out.splitlines()[0].split("  ")[-1].strip() == "95% interval"
