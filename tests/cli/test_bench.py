"""`compress bench`: two graphs, or the engines of a run, timed in turn."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compressor.errors import ErrorCode
from compressor.report.files import to_json
from graph_passes.errors import GraphErrorCode
from tests.command import compress
from tests.generation.counting import write_decoder_only
from tests.report import reports

Cap = pytest.CaptureFixture[str]


def test_bench_times_two_graphs(capfd: Cap, graph: Path) -> None:
    result = compress(
        capfd, "bench", graph, graph, "--batch", "1,2", "--seq", "8", "--seconds", "0.01", "--json", "--quiet"
    )
    assert (result.code, result.err) == (0, "")
    assert [(row["batch"], row["seq"]) for row in result.json["speeds"]] == [(1, 8), (2, 8)]
    refused = compress(capfd, "bench", graph, graph, "--batch", "0")
    assert (refused.code, refused.error_code) == (2, ErrorCode.OUT_OF_RANGE)
    assert "--batch '0'" in refused.error


def test_bench_times_the_engines_of_a_folder(capfd: Cap, graph: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(graph.parent, folder)
    (folder / graph.name).rename(folder / "model.onnx")
    timing = ("--batch", "1", "--seq", "8", "--seconds", "0.01")
    result = compress(capfd, "bench", folder, *timing, "--callers", "2", "--json", "--quiet")
    assert (result.code, result.err) == (0, "")
    assert [(row["target"], row["precision"], row["callers"]) for row in result.json] == [("ort", "fp32", 2)]
    assert "rows/s, callers" in compress(capfd, "bench", folder, *timing, "--callers", "2").out
    for flags, code in (
        (("--precision", "int8"), ErrorCode.CONTRADICTION),
        (("--provider", "cuda"), ErrorCode.CONTRADICTION),
        (("--target", "ort,none"), ErrorCode.UNKNOWN_NAME),
    ):
        refused = compress(capfd, "bench", folder, *flags)
        assert (refused.code, refused.error_code) == (2, code)
    several = compress(capfd, "bench", graph, graph, "--target", "ort,openvino")
    assert (several.code, several.error_code) == (2, ErrorCode.CONTRADICTION)
    alone = compress(capfd, "bench", graph)
    assert (alone.code, alone.error_code) == (2, ErrorCode.MISSING_VALUE)
    engine = compress(capfd, "bench", graph, folder / "engine.xml")
    assert (engine.code, engine.error_code) == (2, ErrorCode.INVALID_VALUE)
    folders = compress(capfd, "bench", graph, folder, *timing, "--json", "--quiet")
    assert (folders.code, len(folders.json["speeds"])) == (0, 1)
    empty = compress(capfd, "bench", graph, tmp_path)
    assert (empty.code, empty.error_code) == (3, GraphErrorCode.FILE_MISSING)


@pytest.mark.zoo
def test_bench_builds_the_engines_of_the_target_of_a_run(capfd: Cap, graph: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(graph.parent, folder)
    (folder / graph.name).rename(folder / "model.onnx")
    (folder / "report.json").write_text(to_json(reports.report(target="openvino")))
    timing = ("--batch", "1", "--seq", "8", "--seconds", "0.01", "--json", "--quiet")
    assert {row["target"] for row in compress(capfd, "bench", folder, *timing).json} == {"openvino"}
    assert {row["target"] for row in compress(capfd, "bench", folder, *timing, "--target", "ort").json} == {"ort"}


@pytest.mark.zoo
def test_the_table_of_bench_names_its_columns(capfd: Cap, graph: Path) -> None:
    result = compress(capfd, "bench", graph, graph, "--batch", "1", "--seq", "8", "--seconds", "0.01")
    assert result.out.splitlines()[0].split("  ")[-1].strip() == "95% interval"


@pytest.mark.parametrize(
    "flags",
    [
        ("--new-tokens", "8"),
        *(("--prompt-tokens", "4", f"--{name}", value) for name, value in (
            ("target", "openvino"), ("callers", "2"), ("seq", "8"), ("precision", "int8"), ("provider", "cpu"))),
    ],
)  # fmt: skip
def test_flags_that_would_change_nothing_are_refused(flags: tuple[str, ...], tmp_path: Path, capfd: Cap) -> None:
    result = compress(capfd, "bench", write_decoder_only(tmp_path / "model"), *flags)
    assert (result.code, result.error_code) == (2, ErrorCode.CONTRADICTION)
    assert result.details["field"] == flags[-2].removeprefix("--").replace("-", "_")
