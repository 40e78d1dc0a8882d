"""Every bad input gives an exit code, an error code and a one-line message, and leaves no file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, load
from compressor.units import find_sites, keep_all
from graph_passes import GraphErrorCode
from tests import folders
from tests.cli.bad_inputs import (
    Arguments,
    already_shrunk_graph,
    another_model,
    apply_command,
    bench_command,
    data_outside_the_folder,
    distill_command,
    empty_evaluation,
    empty_folder,
    fewer_tags_than_words,
    gate_command,
    latency_without_unit,
    learn_command,
    missing_folder,
    nan_weights,
    no_image_processor,
    no_label_column,
    no_tokenizer,
    one_class,
    overflowing_weights,
    pickled_weights,
    plan_next_to_its_weights,
    plan_of_trained_weights,
    remote_code,
    run_with_plan,
    score_command,
    search_command,
    tags_without_words,
    teacher_of_another_vocabulary,
    teacher_of_other_labels,
    too_few_tokens,
    truncate,
    truncated_data,
    truncated_graph,
    truncated_weights,
    two_bounds,
    unknown_columns,
    unknown_key,
    unknown_label,
    unknown_pooling,
    unreachable_budget,
    unreadable_image,
    unsupported_family,
    words_without_tags,
)
from tests.command import compress
from tests.marks import mostly_zoo
from tests.shared_exports import shared_export

Cap = pytest.CaptureFixture[str]

SITE = "bert.encoder.layer.0.attention.self"


@pytest.fixture(scope="module")
def valid_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of valid inputs: `model`, `rows.tsv`, `plan.json`, `dense.onnx`."""
    inputs = tmp_path_factory.mktemp("sound")
    folders.save(folders.bert(), inputs / "model")
    folder = load(inputs / "model")
    batch = example_inputs(folder, 2, 8)
    plan = keep_all(find_sites(folder.model, batch)).model_copy(update={"model": folder.fingerprint})
    plan.save(inputs / "plan.json")
    shared_export(folder.model, plan, batch, inputs / "dense.onnx")
    rows = [f"{index % 2}\tthe {'good' if index % 2 else 'bad'} film {index % 5}" for index in range(40)]
    (inputs / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return inputs


@pytest.fixture
def inputs(valid_inputs: Path, tmp_path: Path) -> Path:
    """A copy of the valid inputs, which a test may damage."""
    return shutil.copytree(valid_inputs, tmp_path / "place")


BAD_INPUTS: dict[str, tuple[Callable[[Path], Arguments], int, str, str]] = {
    "missing folder": (missing_folder, 3, ErrorCode.FILE_MISSING, "nowhere"),
    "empty folder": (empty_folder, 3, ErrorCode.FILE_MISSING, "empty"),
    "no tokenizer": (no_tokenizer, 3, ErrorCode.FILE_MISSING, "model"),
    "pickled weights": (pickled_weights, 3, ErrorCode.UNSAFE_CODE, "--allow-pickle"),
    "remote code": (remote_code, 3, ErrorCode.UNSAFE_CODE, "--trust-remote-code"),
    "weights that overflow": (overflowing_weights, 3, ErrorCode.NOT_FINITE, "bert.embeddings"),
    "NaN weights": (nan_weights, 3, ErrorCode.NOT_FINITE, "model"),
    "truncated safetensors": (truncated_weights, 3, ErrorCode.FILE_UNREADABLE, "model.safetensors"),
    "truncated ONNX": (truncated_graph, 3, ErrorCode.FILE_UNREADABLE, "dense.onnx"),
    "truncated external data": (truncated_data, 3, ErrorCode.FILE_UNREADABLE, "dense.onnx.data"),
    "external data outside": (data_outside_the_folder, 3, GraphErrorCode.UNSAFE_PATH, "dense.onnx.data"),
    "plan with an unknown site": (
        lambda inputs: run_with_plan(inputs, name="bert.nowhere"),
        3,
        ErrorCode.PLAN_MISMATCH,
        "bert.nowhere",
    ),
    "head out of range": (lambda inputs: run_with_plan(inputs, kept=[0, 2]), 3, GraphErrorCode.INVALID_PLAN, "head 2"),
    "head twice": (lambda inputs: run_with_plan(inputs, kept=[1, 1]), 3, GraphErrorCode.INVALID_PLAN, "[1, 1]"),
    "plan with other heads": (
        lambda inputs: run_with_plan(inputs, heads=4, kv_heads=4),
        3,
        ErrorCode.PLAN_MISMATCH,
        "heads is 4",
    ),
    "plan of another model": (another_model, 3, ErrorCode.FILE_MISMATCH, "plan.json"),
    "plan of trained weights": (plan_of_trained_weights, 3, ErrorCode.FILE_MISMATCH, "plan.json"),
    "plan of trained weights that lie beside it": (
        plan_next_to_its_weights,
        3,
        ErrorCode.FILE_MISMATCH,
        "place/run as the model",
    ),
    "no plan": (lambda inputs: [inputs / "model", "--plan", inputs / "p.json"], 3, ErrorCode.FILE_MISSING, "p.json"),
    "graph that is shrunk already": (already_shrunk_graph, 3, ErrorCode.FILE_MISMATCH, "dense.onnx"),
    "output in no folder": (
        lambda inputs: [*apply_command(inputs), "-o", inputs / "no" / "s.onnx"],
        2,
        ErrorCode.FILE_MISSING,
        "place/no",
    ),
    "label that the model does not know": (unknown_label, 3, ErrorCode.LABEL_MISMATCH, "row 41: 'label' is 'zebra'"),
    "score that is no number": (score_command, 3, ErrorCode.INVALID_ROWS, "row 41: 'label'"),
    "words without tags": (words_without_tags, 3, ErrorCode.COLUMN_MISSING, "--label-column"),
    "tags without words": (tags_without_words, 3, ErrorCode.COLUMN_MISSING, "--text-columns"),
    "fewer tags than words": (fewer_tags_than_words, 3, ErrorCode.INVALID_ROWS, "row 2: 'tags'"),
    "image that cannot be read": (unreadable_image, 3, ErrorCode.INVALID_ROWS, "row 5: 'image'"),
    "no image processor": (no_image_processor, 3, ErrorCode.FILE_MISSING, "vit/model"),
    "unknown pooling": (unknown_pooling, 3, ErrorCode.UNSUPPORTED_MODEL, "pooling_mode_median_tokens"),
    "negative keep": (lambda inputs: [*learn_command(inputs), "--keep", "-3"], 2, ErrorCode.OUT_OF_RANGE, "--keep"),
    "too many to keep": (lambda inputs: [*learn_command(inputs), "--keep", "3"], 2, ErrorCode.OUT_OF_RANGE, "--keep 3"),
    "no label column": (no_label_column, 3, ErrorCode.COLUMN_MISSING, "verdict, text"),
    "one class only": (one_class, 3, ErrorCode.INVALID_ROWS, "rows.tsv"),
    "empty evaluation set": (empty_evaluation, 3, ErrorCode.TOO_FEW_ROWS, "eval.tsv"),
    "family without heads": (unsupported_family, 8, ErrorCode.SITE_REFUSED, "fnet"),
    "unknown method": (lambda inputs: [*learn_command(inputs), "--method", "dps"], 2, ErrorCode.UNKNOWN_NAME, "dsp?"),
    "drop beyond the metric": (
        lambda inputs: [*learn_command(inputs), "--max-drop", "1"],
        2,
        ErrorCode.OUT_OF_RANGE,
        "--max-drop 1",
    ),
    "budget that no head fits": (
        lambda inputs: [*search_command(inputs), "--max-drop", "0"],
        2,
        ErrorCode.NOTHING_REMOVED,
        "--max-drop",
    ),
    "too few rows for a guarantee": (
        lambda inputs: [*search_command(inputs), "--max-drop", "0.01", "--certify", "0.95"],
        3,
        ErrorCode.TOO_FEW_ROWS,
        "rows",
    ),
    "penalty of a search": (
        lambda inputs: [*learn_command(inputs), "--method", "taylor", "--lambda", "0.02"],
        2,
        ErrorCode.CONTRADICTION,
        "--lambda 0.02",
    ),
    "budget that gates cannot meet": (
        lambda inputs: [*gate_command(inputs), "--macs", "1%"],
        2,
        ErrorCode.BUDGET_UNREACHABLE,
        "288 remain",
    ),
    "time for gates": (
        lambda inputs: [*gate_command(inputs), "--latency", "1ms"],
        2,
        ErrorCode.MISSING_VALUE,
        "--keep",
    ),
    "budget below what remains": (unreachable_budget, 2, ErrorCode.BUDGET_UNREACHABLE, "the budget of parameters is"),
    "two bounds of the time": (two_bounds, 2, ErrorCode.CONTRADICTION, "--speedup 2, --latency 5ms"),
    "latency without a unit": (latency_without_unit, 2, ErrorCode.INVALID_VALUE, "--latency '5'"),
    "fewer tokens than neurons": (too_few_tokens, 3, ErrorCode.TOO_FEW_ROWS, "--data"),
    "pool within a budget": (
        lambda inputs: [*gate_command(inputs), "--macs", "50%", "--options", "pool=kind"],
        2,
        ErrorCode.CONTRADICTION,
        "pool=kind",
    ),
    "teacher of another tokenizer": (teacher_of_another_vocabulary, 3, ErrorCode.FILE_MISMATCH, "--teacher"),
    "teacher of other labels": (teacher_of_other_labels, 3, ErrorCode.LABEL_MISMATCH, "--teacher"),
    "rows to distill on without the columns": (unknown_columns, 3, ErrorCode.COLUMN_MISSING, "train.tsv"),
    "minutes for less than a step": (
        lambda inputs: [*distill_command(inputs), "--minutes", "1e-9"],
        2,
        ErrorCode.OUT_OF_RANGE,
        "--minutes 1e-09",
    ),
    "ladder beside a plan": (
        lambda inputs: [*distill_command(inputs), "--macs", "50%,40%"],
        2,
        ErrorCode.CONTRADICTION,
        "give one value",
    ),
    "grouping of heads that another method selects": (
        lambda inputs: [*learn_command(inputs), "--group-by", "query"],
        2,
        ErrorCode.CONTRADICTION,
        "--group-by query",
    ),
    "unknown grouping of heads": (
        lambda inputs: [*learn_command(inputs), "--group-by", "queries"],
        2,
        ErrorCode.UNKNOWN_NAME,
        "choose one of kv, query",
    ),
    "unknown key": (unknown_key, 2, ErrorCode.UNKNOWN_NAME, "did you mean keep?"),
    "unknown option": (lambda inputs: [*learn_command(inputs), "--options", "tau=3"], 2, ErrorCode.UNKNOWN_NAME, "tau"),
    "option of another type": (
        lambda inputs: [*learn_command(inputs), "--options", "cooldown=x"],
        2,
        ErrorCode.INVALID_VALUE,
        "cooldown",
    ),
    "option out of its range": (
        lambda inputs: [*learn_command(inputs), "--options", "warmup=2"],
        2,
        ErrorCode.OUT_OF_RANGE,
        "warmup",
    ),
    "unknown task": (
        lambda inputs: [inputs / "model", "--task", "text-classifcation"],
        2,
        ErrorCode.UNKNOWN_NAME,
        "--task text-classifcation",
    ),
    "no such runtime": (
        lambda inputs: [*bench_command(inputs, "dense.onnx"), "--target", "trt"],
        6,
        ErrorCode.DEVICE_MISSING,
        "trt",
    ),
    "neither folder nor graph": (lambda inputs: ["sites", inputs / "no"], 3, ErrorCode.FILE_MISSING, "place/no"),
    "benchmark of nothing": (lambda inputs: bench_command(inputs, "no.onnx"), 3, ErrorCode.FILE_MISSING, "no.onnx"),
    "benchmark of a truncated graph": (
        lambda inputs: bench_command(inputs, truncate(inputs / "dense.onnx")),
        3,
        ErrorCode.FILE_UNREADABLE,
        "dense.onnx",
    ),
    "benchmark of truncated data": (
        lambda inputs: bench_command(inputs, truncate(inputs / "dense.onnx.data")),
        3,
        ErrorCode.FILE_UNREADABLE,
        "dense.onnx.data",
    ),
    "benchmark of too long a text": (
        lambda inputs: [*bench_command(inputs, "dense.onnx"), "--seq", "99"],
        3,
        ErrorCode.RUNTIME_FAILED,
        "dense.onnx",
    ),
    "text too long": (lambda inputs: [inputs / "model", "--seq", "99"], 3, ErrorCode.OUT_OF_RANGE, "--seq"),
    "no half precision on a CPU": (
        lambda inputs: [inputs / "model", "--precision", "fp16", "--provider", "cpu"],
        6,
        ErrorCode.DEVICE_MISSING,
        "fp16",
    ),
}
"""Fault -> function that makes the fault and returns the command, exit code, error code, text of the message."""


LONG = (
    *("budget that gates cannot meet", "budget that no head fits", "benchmark of too long a text"),
    *("fewer tokens than neurons", "minutes for less than a step"),
)
"""Faults that are noticed after a graph is exported, units are learned or an engine is built."""


@pytest.mark.parametrize("name", mostly_zoo(BAD_INPUTS, *(BAD_INPUTS.keys() - set(LONG))))
def test_bad_input_gives_a_one_line_error(name: str, inputs: Path, capfd: Cap) -> None:
    make_fault, exit_code, error_code, expected = BAD_INPUTS[name]
    out = inputs.parent / "out"
    arguments = make_fault(inputs)
    needs_output = arguments[0] not in ("bench", "sites") and "-o" not in arguments
    result = compress(capfd, *arguments, *(("-o", out) if needs_output else ()), "--quiet")
    assert (result.code, result.error_code, result.out) == (exit_code, error_code, "")
    assert expected in result.error
    assert len(result.error) < 500
    assert [path.name for path in inputs.parent.iterdir()] == ["place"]


def test_an_existing_output_is_refused(inputs: Path, capfd: Cap) -> None:
    out = inputs.parent / "out"
    out.mkdir()
    (out / "letter.txt").touch()
    result = compress(capfd, inputs / "model", "-o", out, "--quiet")
    assert (result.code, result.error_code) == (2, ErrorCode.OUTPUT_EXISTS)
    assert "--force" in result.error
    assert [path.name for path in out.iterdir()] == ["letter.txt"]
