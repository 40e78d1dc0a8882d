"""The command line: commands, common flags anywhere, results on stdout, the rest on stderr."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.cli import message_of
from compressor.cli.console import Console, text_table
from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, load
from compressor.report import write
from compressor.report.files import to_json
from compressor.results import CurvePoint
from compressor.units import find_sites, keep_all
from graph_passes import BlockMask, RefusalCode, save
from tests.command import compress
from tests.graph_passes.image_layer import SHAPE, image_layer
from tests.graph_passes.layers import GROUPED
from tests.report import reports

Cap = pytest.CaptureFixture[str]


def test_help_names_the_commands_in_order(capfd: Cap) -> None:
    result = compress(capfd, "--help")
    assert (result.code, result.err) == (0, "")
    assert re.findall(r"^  (\w[\w-]*)\*? {2,}\w", result.out, re.MULTILINE) == [
        "run",
        "explain",
        "sites",
        "costs",
        "apply",
        "build",
        "bench",
        "check",
        "report",
        "generate",
        "train",
        "export-triton",
        "kernel",
        "recipe",
    ]
    assert compress(capfd).out == result.out


def test_run_is_the_default_command(capfd: Cap) -> None:
    for arguments in (
        ["nowhere/"],
        ["run", "nowhere/"],
        ["--target", "ort", "nowhere/"],
        ["--json", "--seed", "3", "nowhere/"],
    ):
        result = compress(capfd, *arguments, "--quiet")
        assert (result.code, result.out) == (3, "")
        assert result.error == "nowhere: no such folder; give the folder that save_pretrained wrote, or an ONNX file"


@pytest.mark.parametrize(("words", "code"), [(["site", "model/"], 2), (["site"], 3), (["site", "--keep", "1"], 3)])
def test_a_mistyped_command_is_no_folder_and_gives_a_suggestion(capfd: Cap, words: list[str], code: int) -> None:
    result = compress(capfd, *words)
    assert result.code == code
    assert all(part in result.error for part in ("site: no such folder", "did you mean sites?"))
    assert code == 2 or (result.error_code, result.details["path"]) == (ErrorCode.FILE_MISSING, Path("site"))


def test_a_folder_may_have_a_name_like_that_of_a_command(
    capfd: Cap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    assert "is empty" in compress(capfd, "site", "--quiet").error
    assert "did you mean" not in compress(capfd, "site", "model/").error
    assert "did you mean" not in compress(capfd, "elsewhere/site", "--quiet").error


@pytest.mark.parametrize("arguments", [["--json", "sites"], ["sites", "--json"]])
def test_common_flags_are_accepted_anywhere(capfd: Cap, model: Path, arguments: list[str]) -> None:
    result = compress(capfd, *arguments, model, "--quiet")
    assert (result.code, result.err) == (0, "")
    layer = "bert.encoder.layer.0"
    heads = {"type": "heads", "kind": "bidirectional", "units": 2, "step": 1, "kv_heads": 2, "head_dim": 8}
    neurons = {"type": "neurons", "kind": None, "units": 20, "step": 1, "kv_heads": None, "head_dim": None}
    costs = ("parameters", "macs", "ms")
    assert [{name: value for name, value in row.items() if name not in costs} for row in result.json] == [
        {"name": f"{layer}.attention.self", **heads},
        {"name": f"{layer}.output.dense", **neurons},
    ]
    assert all(set(row) >= set(costs) for row in result.json)


def test_flags_for_a_folder_are_refused_beside_a_graph(capfd: Cap, graph: Path) -> None:
    result = compress(capfd, "sites", graph, "--task", "text-classification")
    assert (result.code, result.error_code) == (2, ErrorCode.CONTRADICTION)


@pytest.mark.parametrize("arguments", [["recipe"], ["--help"]])
def test_a_reader_that_has_gone_ends_the_command_with_its_code(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-m", "compressor.cli", *arguments], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (process.returncode, process.stderr) == (141, b"")


def test_sites_of_a_folder_and_of_its_graph_agree(capfd: Cap, model: Path, graph: Path) -> None:
    folder_sites = compress(capfd, "sites", model)
    graph_sites = compress(capfd, "sites", graph)
    (columns, heads, neurons), (graph_columns, *graph_rows) = map(table_of, (folder_sites.out, graph_sites.out))
    assert columns == ["name", "type", "kind", "units", "step", "kv_heads", "head_dim", "parameters", "macs"]
    assert graph_columns == [column for column in columns if column != "step"]  # without columns that are empty
    assert [row[:6] for row in graph_rows] == [[*row[:4], *row[5:7]] for row in (heads, neurons)]
    assert neurons[1:7] == ["neurons", "-", "20", "1", "-", "-"]
    assert all(share.endswith("%") for row in (heads, neurons) for share in row[7:9])
    assert folder_sites.err.startswith("finding units")
    assert uncounted(capfd, graph) == uncounted(capfd, model)
    # The folder has its whole graph counted, with the positions that it reads.
    rows, folder_rows = (compress(capfd, "sites", path, "--seq", "6", "--json").json for path in (graph, model))
    for row, folder_row in zip(rows, folder_rows, strict=True):
        assert row["parameters"] == pytest.approx(folder_row["parameters"], rel=0.02)
        assert 0 < row["macs"] < 1


@pytest.mark.zoo
def test_shares_of_sites_are_those_of_what_a_plan_without_them_lacks(
    capfd: Cap, model: Path, graph: Path, tmp_path: Path
) -> None:
    heads, neurons = compress(capfd, "sites", "--json", "--seq", "6", model).json
    network = load(model).model
    whole = sum(weight.numel() for weight in network.parameters())
    hidden, units = network.config.hidden_size, neurons["units"]
    # Queries, keys, values and outputs of all heads, and two projections, with their biases but for those of outputs.
    assert heads["parameters"] == pytest.approx((4 * hidden**2 + 3 * hidden) / whole, rel=0.02)
    assert neurons["parameters"] == pytest.approx((2 * hidden * units + units) / whole, rel=0.02)
    # The shares are those of one size: longer rows have more attention.
    longer, _ = compress(capfd, "sites", "--json", "--seq", "12", model).json
    assert longer["parameters"] == heads["parameters"]
    assert longer["macs"] > heads["macs"] > 0


@pytest.mark.zoo
def test_sites_are_listed_without_shares_where_none_are_counted(capfd: Cap, model: Path) -> None:
    counted = compress(capfd, "sites", "--json", model)
    listed = compress(capfd, "sites", "--json", "--no-count", model)
    assert "exporting" not in listed.err
    assert listed.json == [{**row, "parameters": None, "macs": None} for row in counted.json]


def test_a_group_of_which_half_of_the_units_cannot_be_removed_has_no_shares(capfd: Cap, tmp_path: Path) -> None:
    """Heads that share keys can be removed, but no shared key: an operator before it has no rule."""
    body = GROUPED.body.replace("k3 = Unsqueeze (k2, two)", "k_ = Shrink <lambd = 0.0> (k2) k3 = Unsqueeze (k_, two)")
    save(dataclasses.replace(GROUPED, body=body).graph(), tmp_path / "graph.onnx")
    listed = compress(capfd, "sites", tmp_path / "graph.onnx", "--json")
    (heads,) = listed.json
    assert (heads["units"], heads["kv_heads"], heads["parameters"], heads["macs"]) == (4, 2, None, None)
    assert "Shrink" in listed.err


def test_the_length_of_sites_is_checked(capfd: Cap, model: Path) -> None:
    result = compress(capfd, "sites", model, "--seq", "0")
    assert (result.code, result.error_code, result.details["field"]) == (2, ErrorCode.OUT_OF_RANGE, "seq")


def table_of(text: str) -> list[list[str]]:
    """The cells of a printed table."""
    return [line.split() for line in text.splitlines()]


def uncounted(capfd: Cap, path: Path) -> list[dict[str, Any]]:
    """The rows with what is known of a graph."""
    rows = compress(capfd, "sites", "--json", "--no-count", path).json
    return [row | {"step": None, "ms": None} for row in rows]


def test_a_graph_in_which_nothing_can_be_removed_is_refused_with_the_reason(capfd: Cap, tmp_path: Path) -> None:
    path, rows, misnamed = (tmp_path / name for name in ("image.onnx", "rows.npz", "misnamed.npz"))
    save(image_layer(), path)
    np.savez(rows, x=np.zeros(SHAPE, np.float32))
    np.savez(misnamed, image=np.zeros(SHAPE, np.float32))
    result = compress(capfd, "sites", path)
    assert (result.code, result.error_code) == (3, ErrorCode.SITE_REFUSED)
    assert result.details["reason"] == RefusalCode.UNKNOWN_SHAPE
    (listed_group,) = compress(capfd, "sites", path, "--inputs", rows, "--json").json
    assert (listed_group["type"], listed_group["units"]) == ("neurons", 20)
    assert compress(capfd, "sites", path, "--inputs", misnamed).error_code == ErrorCode.UNKNOWN_NAME
    assert compress(capfd, "sites", path, "--inputs", path).error_code == ErrorCode.FILE_UNREADABLE


def test_apply_shrinks_a_graph(capfd: Cap, graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.onnx"
    result = compress(capfd, "apply", graph, "--plan", graph.with_name("plan.json"), "-o", out, "--json")
    assert result.code == 0
    assert (result.json["heads"], result.json["kept"]) == (2, 1)
    assert [row["units"] for row in compress(capfd, "sites", "--json", out).json] == [1, 20]
    repeated = compress(capfd, "apply", graph, "--plan", graph.with_name("plan.json"), "-o", out)
    assert repeated.code == 2
    assert repeated.error_code == ErrorCode.OUTPUT_EXISTS
    assert str(out) in repeated.error


@pytest.mark.zoo
def test_apply_reports_which_masks_are_lowered(capfd: Cap, model: Path, tmp_path: Path) -> None:
    from compressor.export import export_reference

    folder = load(model)
    inputs = example_inputs(folder, 2, 8)
    plan = keep_all(find_sites(folder.model, inputs))
    kept = np.ones((plan.sites[0].heads, 2, 2), np.bool_)
    kept[:, 0, 1] = False
    # Attention under a mask of single entries stays dense.
    masked_plans = {1: plan.masked({plan.sites[0].name: BlockMask(kept[:, :1, :1], 1)})}
    masked_plans[8] = plan.masked({plan.sites[0].name: BlockMask(kept, 8)})
    for block, masked_plan in masked_plans.items():
        reference, out = tmp_path / f"{block}.onnx", tmp_path / f"{block}-small.onnx"
        export_reference(folder.model, masked_plan, inputs, reference)
        masked_plan.save(tmp_path / f"{block}.json")
        result = compress(capfd, "apply", reference, "--plan", tmp_path / f"{block}.json", "-o", out, "--json")
        assert result.code == 0, result.err
        lowered = [plan.sites[0].name] if block == 8 else []
        assert result.json["block_sparse"] == lowered
        assert ("stays dense under its mask" in result.err) is (not lowered)
        for path in (reference, out):
            heads, of_model = ([row for row in uncounted(capfd, p) if row["type"] == "heads"] for p in (path, model))
            # Heads of block-sparse attention cannot be removed, since its function holds blocks for each of them.
            assert heads == ([] if path == out and lowered else of_model)


def test_report_is_rewritten(capfd: Cap, tmp_path: Path) -> None:
    report = reports.report()
    (tmp_path / "report.json").write_text(to_json(report))
    result = compress(capfd, "report", tmp_path)
    assert (result.code, report.verdict[:40] in " ".join(result.out.split())) == (0, True)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert compress(capfd, "report", tmp_path, "--quiet").out.strip() == report.verdict
    assert compress(capfd, "report", tmp_path, "--json").json == report.model_dump(mode="json")


@pytest.mark.zoo
def test_another_report_is_rewritten_beside_that_of_a_folder(capfd: Cap, tmp_path: Path) -> None:
    report = reports.report()
    write(report, tmp_path)
    content = (tmp_path / "report.json").read_text()
    (tmp_path / "run-report.json").write_text(to_json(report.model_copy(update={"target": "trt"})))
    assert compress(capfd, "report", tmp_path / "run-report.json").code == 0
    assert (tmp_path / "report.json").read_text() == content
    assert (tmp_path / "run-report.html").is_file()


def test_numbers_that_json_lacks_are_texts(capfd: Cap, tmp_path: Path) -> None:
    curve = CurvePoint(step=1, values={"loss": float("nan"), "gate": float("inf")})
    write(reports.report(curves=(curve,)), tmp_path)
    values = compress(capfd, "report", tmp_path, "--json").json["curves"][0]["values"]
    assert values == {"loss": "NaN", "gate": "Infinity"}


def test_debug_prints_a_traceback(capfd: Cap) -> None:
    result = compress(capfd, "nowhere/", "--debug", "--quiet")
    assert result.err.startswith("Traceback (most recent call last)")
    assert result.err.splitlines()[-1].startswith("compress: nowhere: no such folder")


def test_an_unknown_option_suggests_the_nearest_one(capfd: Cap) -> None:
    assert compress(capfd, "model/", "--bogus").error == "no such option: --bogus. Try 'compress run --help-all'."
    result = compress(capfd, "model/", "--eval-dta", "x")
    assert result.error == "no such option: --eval-dta, did you mean --eval-data? Try 'compress run --help-all'."


@pytest.mark.parametrize(
    "words", [["--teacher", "-o", "out"], ["--data", "--distill"], ["-o", "--no-distill"], ["--data", "--seed=1"]]
)
def test_a_flag_is_no_value_of_another(capfd: Cap, words: list[str]) -> None:
    result = compress(capfd, "model", *words)
    assert result.code == 2
    assert all(word.partition("=")[0] in result.error for word in words[:2])


def test_every_command_refuses_flags_as_values(capfd: Cap) -> None:
    assert "-o" in compress(capfd, "apply", "graph.onnx", "--plan", "-o", "out.onnx").error


def test_a_file_may_have_the_name_of_a_flag(capfd: Cap, tmp_path: Path) -> None:
    result = compress(capfd, tmp_path / "model", "--macs", "50%", "--data=--distill")
    assert (result.code, result.error_code) == (3, ErrorCode.FILE_MISSING)


def test_an_unknown_command_lists_the_commands(capfd: Cap) -> None:
    result = compress(capfd, "frobnicate", "x")
    assert result.code == 2
    assert "frobnicate: no such folder" in result.error
    assert "run, explain, sites" in result.error


def test_a_log_has_lines_of_the_progress_of_a_long_stage(capfd: Cap) -> None:
    for seconds, lines in ((0.0, ["train: 1 of 2", "train: 2 of 2", "train  "]), (60.0, ["train  "])):
        with Console(seconds).stage("train") as progress:
            progress(1, 2)
            progress(2, 2)
        printed = capfd.readouterr().err.splitlines()
        assert [line[: len(start)] for line, start in zip(printed, lines, strict=True)] == lines


def test_a_narrow_terminal_cuts_no_cell(capfd: Cap) -> None:
    table, cell = text_table("heading" * 20), "cell" * 40
    table.add_row(cell)
    Console().result(table, None)
    assert "".join(capfd.readouterr().out.split()) == "heading" * 20 + cell


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 3),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 3),
        (torch.OutOfMemoryError("CUDA out of memory"), 3),
        (RuntimeError("something else"), 1),
    ],
)
def test_a_lack_of_memory_is_a_fault_of_the_machine(error: Exception, code: int) -> None:
    assert message_of(error)[1] == code


def test_values_of_rows_do_not_command_the_terminal(capfd: Cap) -> None:
    Console().error("row 1: 'a\x1b[31m\x00b\n.png' is missing")
    printed = capfd.readouterr().err.removesuffix("\n")
    assert printed.isprintable()
    assert "[31m" in printed
