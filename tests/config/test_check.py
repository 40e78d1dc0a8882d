"""Requests of `compress check`: flags and Python values are read alike, and every fault names its field."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.config.check import CheckArtifacts, CheckRequest
from compressor.errors import ErrorCode, UsageError


def request_with(**fields: Any) -> CheckRequest:
    return CheckRequest(**{"model": "small", "baseline": "dense", **fields})


def fault(construct: Any, **fields: Any) -> tuple[ErrorCode, str]:
    """Code and field of the error that a request raises."""
    with pytest.raises(UsageError) as error:
        construct(**fields)
    return error.value.code, error.value.details["field"]


def read_or_refuse(field: str, value: object) -> Any:
    """The field's value; None if the request is refused because of it."""
    try:
        return getattr(request_with(**{field: value}), field)
    except UsageError as error:
        refused = error.details["field"]
    assert refused == field
    return None


@given(st.text(max_size=8) | st.floats() | st.integers() | st.floats(0, 1e3).map("{}%".format))
def test_a_slowdown_is_a_share_or_is_refused(value: object) -> None:
    slowdown = read_or_refuse("max_slowdown", value)
    assert slowdown is None or 0 <= slowdown < float("inf")
    assert slowdown is None or slowdown < 1 or "%" in str(value)


@given(st.text(max_size=8) | st.floats() | st.integers() | st.floats(0, 1e3).map("{}ms".format))
def test_a_latency_bound_is_a_time_or_is_refused(value: object) -> None:
    p99 = read_or_refuse("p99", value)
    assert p99 is None or 0 < p99 < float("inf")


def test_units_of_shares_and_times() -> None:
    assert [request_with(max_slowdown=value).max_slowdown for value in (0.05, "0.05", "5%", "500%")] == [
        *(0.05, 0.05, 0.05, 5.0)
    ]
    times = {10: 10.0, "10": 10.0, "10ms": 10.0, "0.5s": 500.0, "800us": 0.8}
    assert {value: request_with(p99=value).p99 for value in times} == times


@pytest.mark.parametrize("value", [5, 5.0, "5", "5.0", -0.1, "nan"])
def test_five_is_not_a_share(value: object) -> None:
    assert fault(request_with, max_slowdown=value) == (ErrorCode.OUT_OF_RANGE, "max_slowdown")


def test_flags_and_python_values_are_read_alike() -> None:
    flags = {"scenario": "server, singlestream,server", "text_columns": "question,,context", "batch": "8", "rate": "5"}
    values = {"scenario": ["Server", "SingleStream"], "text_columns": ("question", "context"), "batch": 8, "rate": 5.0}
    assert request_with(**flags, inputs="a.tsv") == request_with(**values, inputs=Path("a.tsv"))
    assert request_with(**flags, inputs="a.tsv").scenarios == ("Server", "SingleStream")
    assert request_with(expect=Path("out"), baseline=Path("b.json")) == request_with(expect="out", baseline="b.json")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"expect": "any", "tolerance": 0.01}, "tolerance"),
        ({"inputs": "a.npz", "tokenizer": "m"}, "tokenizer"),
    ],
)
def test_fields_without_effect_are_refused(fields: dict[str, Any], field: str) -> None:
    assert fault(request_with, **fields) == (ErrorCode.CONTRADICTION, field)


URL = "http://localhost:8000/v1/completions"
STREAMS: tuple[dict[str, Any], ...] = (
    {"model": URL, "baseline": URL},
    {"model": "out", "baseline": "dense", "prompt_tokens": 8},
)


@pytest.mark.parametrize("models", STREAMS)
@pytest.mark.parametrize(
    "fields",
    [
        *({"batch": 2}, {"seq": 8}, {"inputs": "rows.txt"}, {"kernel": "k.so"}, {"p99": 10}, {"scenario": "server"}),
        *({"gzip": True}, {"server": "http://localhost:8000"}, {"save_baseline": "b.json"}, {"force": True}),
    ],
)
def test_options_of_whole_outputs_are_refused_for_streams(models: dict[str, Any], fields: dict[str, Any]) -> None:
    assert fault(request_with, **models, **fields) == (ErrorCode.CONTRADICTION, next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"new_tokens": 8}, "new_tokens"),
        ({"model": URL}, "baseline"),
        ({"baseline": URL}, "baseline"),
        ({"prompt_tokens": 8, "baseline": "b.json"}, "baseline"),
        ({"model": URL, "baseline": URL, "expect": "out"}, "expect"),
        ({"model": URL, "baseline": URL, "tolerance": 0.1}, "tolerance"),
        ({"model": URL, "baseline": URL, "threads": 2}, "threads"),
        ({"model": URL, "baseline": URL, "certificate": "ca.pem"}, "certificate"),
        ({"prompt_tokens": 8, "header": "A: b"}, "header"),
    ],
)
def test_streams_are_of_two_endpoints_or_two_folders(fields: dict[str, Any], field: str) -> None:
    assert fault(request_with, **fields) == (ErrorCode.CONTRADICTION, field)


def test_lengths_of_streams_have_defaults() -> None:
    assert request_with(**STREAMS[0]).lengths == (128, 32)
    assert request_with(**STREAMS[1], new_tokens="3").lengths == (8, 3)
    assert [request_with(**models).streams for models in STREAMS] == [True, True]
    assert not request_with().streams


def test_a_request_can_be_sent_to_another_process() -> None:
    request = request_with(max_slowdown="500%", p99="10ms", scenario="server", inputs="rows.tsv")
    assert pickle.loads(pickle.dumps(request)) == request


def test_a_bound_without_a_scenario_is_single_stream() -> None:
    assert request_with(p99=10).scenarios == ("SingleStream",)
    assert request_with().scenarios == ()


def test_a_saved_baseline_is_recognized_by_its_suffix() -> None:
    assert request_with(baseline="dense.json").baseline_file == Path("dense.json")
    assert request_with().baseline_file is None


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"max_slowdown": "much"}, ErrorCode.INVALID_VALUE, "max_slowdown"),
        ({"p99": "-1ms"}, ErrorCode.OUT_OF_RANGE, "p99"),
        ({"p99": "soon"}, ErrorCode.INVALID_VALUE, "p99"),
        ({"tolerance": "nan"}, ErrorCode.OUT_OF_RANGE, "tolerance"),
        ({"tolerance": -1}, ErrorCode.OUT_OF_RANGE, "tolerance"),
        ({"deadline": "inf"}, ErrorCode.OUT_OF_RANGE, "deadline"),
        ({"deadline": 0}, ErrorCode.OUT_OF_RANGE, "deadline"),
        ({"seconds": 0}, ErrorCode.OUT_OF_RANGE, "seconds"),
        ({"load_seconds": 0}, ErrorCode.OUT_OF_RANGE, "load_seconds"),
        ({"rate": 0, "scenario": "server"}, ErrorCode.OUT_OF_RANGE, "rate"),
        ({"batch": 0}, ErrorCode.OUT_OF_RANGE, "batch"),
        ({"seq": "many"}, ErrorCode.INVALID_VALUE, "seq"),
        ({"threads": 0}, ErrorCode.OUT_OF_RANGE, "threads"),
        ({"threads": 2**40}, ErrorCode.OUT_OF_RANGE, "threads"),
        ({"prompt_tokens": 0}, ErrorCode.OUT_OF_RANGE, "prompt_tokens"),
        ({"prompt_tokens": 8, "new_tokens": 1}, ErrorCode.OUT_OF_RANGE, "new_tokens"),
        ({"seed": -1}, ErrorCode.OUT_OF_RANGE, "seed"),
        ({"seed": 2**63}, ErrorCode.OUT_OF_RANGE, "seed"),
        ({"scenario": "multistream"}, ErrorCode.UNKNOWN_NAME, "scenario"),
        ({"p99": "1ms", "scenario": "offline"}, ErrorCode.CONTRADICTION, "p99"),
        ({"rate": 5}, ErrorCode.CONTRADICTION, "rate"),
        ({"server": "grpc://localhost:8001", "kernel": "k.so"}, ErrorCode.CONTRADICTION, "kernel"),
        ({"server": "http://localhost:8000", "p99": 10}, ErrorCode.CONTRADICTION, "server"),
        ({"server": "grpc://localhost:8001", "threads": 2}, ErrorCode.CONTRADICTION, "threads"),
        ({"tokenizer": "model"}, ErrorCode.CONTRADICTION, "tokenizer"),
        ({"text_columns": "text"}, ErrorCode.CONTRADICTION, "text_columns"),
        ({"image_column": "photo"}, ErrorCode.CONTRADICTION, "image_column"),
        ({"save_baseline": "b.dat"}, ErrorCode.INVALID_VALUE, "save_baseline"),
        ({"save_baseline": "nowhere/b.json"}, ErrorCode.FILE_MISSING, "save_baseline"),
        ({"save_baseline": "/"}, ErrorCode.FILE_UNWRITABLE, "save_baseline"),
        ({"baseline": None}, ErrorCode.MISSING_VALUE, "baseline"),
    ],
)
def test_faults_name_their_field(fields: dict[str, Any], code: ErrorCode, field: str) -> None:
    assert fault(request_with, **fields) == (code, field)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"plot": "p.svg"}, ErrorCode.CONTRADICTION, "plot"),
        ({"plot": "p.pdf", "history": "h.jsonl"}, ErrorCode.INVALID_VALUE, "plot"),
        ({"junit": "nowhere/j.xml"}, ErrorCode.FILE_MISSING, "junit"),
    ],
)
def test_faults_of_files_name_their_field(fields: dict[str, Any], code: ErrorCode, field: str) -> None:
    assert fault(CheckArtifacts, **fields) == (code, field)


def test_messages() -> None:
    messages = {
        "max_slowdown": ({"max_slowdown": "5"}, "--max-slowdown '5': out of range; give a percentage such as 5%, or a"),
        "rate": ({"rate": "5"}, "--rate 5: this is the rate of the server scenario; add server to --scenario"),
        "scenario": ({"scenario": "sever"}, "--scenario 'sever': unknown scenario sever; did you mean server?"),
    }
    for fields, message in messages.values():
        with pytest.raises(UsageError) as error:
            request_with(**fields)
        assert str(error.value).startswith(message)
