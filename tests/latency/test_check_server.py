"""Checks of a server's models: wrong outputs, deadlines, missing models, and servers that die midway."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.errors import ErrorCode, InputError, MismatchError, ServerError, UsageError
from compressor.latency import CheckPhase, Outcome, Verdict, check
from compressor.latency.triton import split_url
from compressor.results import NoteCode
from tests.faults import fails_with
from tests.latency.grpc_server import MODELS, linear, request_for, serving
from tests.latency.notes import NoteListener
from tests.latency.timers import EQUAL_TIMES, drawn_times

CALLS_TO_COMPARE = 16
"""Inferences of each model before it is timed."""


def check_once(url: str, **fields: Any) -> Verdict:
    return check(request_for(url, **fields), timer=EQUAL_TIMES)


def test_models_of_a_server_are_compared() -> None:
    listener = NoteListener()
    with serving() as url:
        verdict = check(request_for(url), listener, EQUAL_TIMES)
    assert verdict.outcome is Outcome.PASSED
    assert verdict.host == f"fake 1 at {url.removeprefix('grpc://')}, over grpc"
    assert (verdict.outputs.expected, verdict.outputs.tolerance) == ("the baseline", 2e-2)
    assert listener.codes == [NoteCode.RANDOM_INPUTS]


@pytest.mark.parametrize(("slower", "outcome"), [(0.9, Outcome.PASSED), (1.0, Outcome.PASSED), (1.2, Outcome.FAILED)])
def test_a_slower_model_fails(slower: float, outcome: Outcome) -> None:
    with serving() as url:
        verdict = check(request_for(url, max_slowdown="5%"), timer=drawn_times(slower, 1.0))
    assert verdict.outcome is outcome
    assert verdict.slowdown is not None
    assert verdict.slowdown.slowdown == pytest.approx(slower - 1, abs=0.02)


@pytest.mark.parametrize(
    "url", ["localhost:8001", "grpc://localhost", "http://localhost:0", "grpc://localhost:8001/v2"]
)
def test_an_address_has_a_host_and_a_port_and_nothing_else(url: str) -> None:
    with fails_with(ErrorCode.INVALID_VALUE, UsageError, field="server", value=url):
        split_url(url)
    assert split_url("grpc://localhost:8001") == ("grpc", "localhost:8001")


Model = Callable[[np.ndarray], np.ndarray]
WRONG: list[tuple[Model, ErrorCode]] = [
    (lambda x: np.zeros((0, 3)), ErrorCode.TENSOR_MISMATCH),
    (lambda x: linear(x) + 1, ErrorCode.OUTPUTS_DIFFER),
    (lambda x: linear(x) * np.nan, ErrorCode.NOT_FINITE),
    (lambda x: linear(x)[:, :2], ErrorCode.OUTPUTS_DIFFER),
]


@pytest.mark.parametrize(("model", "code"), WRONG)
def test_wrong_outputs_are_not_timed(model: Model, code: ErrorCode) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("the models were timed")

    with serving({"small": model, "dense": linear}) as url, pytest.raises(MismatchError) as error:
        check(request_for(url), timer=refuse)
    assert (error.value.code, error.value.details["model"]) == (code, "small")


def test_outputs_of_the_baseline_are_checked() -> None:
    with (
        serving({"small": linear, "dense": lambda x: linear(x) * np.nan}) as url,
        pytest.raises(MismatchError) as error,
    ):
        check_once(url)
    assert (error.value.code, error.value.details["model"]) == (ErrorCode.NOT_FINITE, "dense")


def test_outputs_that_change_during_timing_are_wrong() -> None:
    calls = itertools.count()
    unstable = {"small": lambda x: linear(x) + (next(calls) >= 40), "dense": linear}
    with serving(unstable) as url, pytest.raises(MismatchError) as error:
        check_once(url)
    assert error.value.code is ErrorCode.OUTPUTS_DIFFER
    assert next(calls) > 40, "the models were timed"
    calls = itertools.count()
    with serving(unstable) as url:
        assert check_once(url, expect="any").passed
    assert next(calls) > 40


def test_a_model_may_compute_another_function_by_design() -> None:
    with serving({"small": lambda x: linear(x) + 1, "dense": linear}) as url:
        assert check_once(url, expect="any").passed


def test_the_version_of_a_model_is_a_number() -> None:
    with serving() as url:
        assert check_once(url, model="small:1", baseline="small:2").model == "small:1"
        with pytest.raises(ServerError) as missing:
            check_once(url, model="small:3")
        assert (missing.value.code, missing.value.details["model"]) == (ErrorCode.MODEL_NOT_READY, "small:3")
        for name in ("small:", ":1", "small:new"):
            with pytest.raises(UsageError) as error:
                check_once(url, model=name)
            assert (error.value.code, error.value.details["value"]) == (ErrorCode.INVALID_VALUE, name)


def test_a_record_has_the_length_of_the_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    listener = NoteListener()
    with serving() as url:
        verdict = check(request_for(url, inputs=tmp_path / "x.npz"), listener, EQUAL_TIMES)
    assert (verdict.seq, verdict.inputs) == (4, "2 rows of x.npz")
    assert listener.codes == []


def test_a_missing_server_and_a_missing_model_are_reported() -> None:
    with pytest.raises(ServerError) as error:
        check_once("grpc://127.0.0.1:9", deadline=1.0)
    assert error.value.code is ErrorCode.SERVER_UNREACHABLE
    with serving({"dense": linear}) as url, pytest.raises(ServerError) as error:
        check_once(url)
    assert (error.value.code, error.value.details["model"]) == (ErrorCode.MODEL_NOT_READY, "small")


@pytest.mark.parametrize("url", ["localhost:8001", "http://", "http://localhost:here", "grpc://localhost:99999"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as error:
        check_once(url)
    assert (error.value.code, error.value.details["value"]) == (ErrorCode.INVALID_VALUE, url)


def test_a_call_that_takes_too_long_times_out() -> None:
    start = time.monotonic()
    with serving(delay=2.0) as url, pytest.raises(ServerError) as error:
        check_once(url, deadline=0.3)
    assert error.value.code is ErrorCode.SERVER_TIMEOUT
    assert time.monotonic() - start < 30


def test_a_check_of_a_server_that_dies_during_timing_keeps_its_measurements() -> None:
    with serving(dies_after=2 * CALLS_TO_COMPARE + 20) as url:
        verdict = check_once(url)
    assert (verdict.outcome, verdict.phase) == (Outcome.INTERRUPTED, CheckPhase.TIMING)
    assert verdict.slowdown is not None
    assert verdict.slowdown.rounds == 10
    assert "gone" in verdict.interrupted


def test_a_server_that_dies_before_the_last_comparison_does_not_pass() -> None:
    with serving(dies_after=2 * CALLS_TO_COMPARE + 60) as url:
        verdict = check_once(url)
    assert (verdict.outcome, verdict.phase) == (Outcome.INTERRUPTED, CheckPhase.CONFIRMING)
    assert verdict.slowdown is not None
    assert verdict.slowdown.rounds == 30


def test_a_check_of_a_model_that_is_unloaded_midway_keeps_its_measurements() -> None:
    models, calls = dict(MODELS), itertools.count(1)

    def unload(x: np.ndarray) -> np.ndarray:
        if next(calls) == CALLS_TO_COMPARE + 24:
            del models["small"]
        return linear(x)

    models["small"] = unload
    with serving(models) as url:
        verdict = check_once(url)
    assert (verdict.outcome, verdict.phase) == (Outcome.INTERRUPTED, CheckPhase.TIMING)
    assert verdict.slowdown is not None
    assert verdict.slowdown.rounds == 24


def test_a_model_of_a_server_is_compared_with_its_saved_baseline(tmp_path: Path) -> None:
    saved, listener = tmp_path / "dense.json", NoteListener()
    with serving() as url:
        slow = request_for(url, model="dense", save_baseline=saved, max_slowdown="5%")
        assert check(slow, listener, drawn_times(2.0, 1.0)).outcome is Outcome.FAILED
        assert listener.codes == [NoteCode.RANDOM_INPUTS, NoteCode.BASELINE_NOT_SAVED]
        assert not saved.exists()
        assert check_once(url, model="dense", save_baseline=saved).passed
        verdict = check(request_for(url, baseline=saved, max_slowdown="5%"), timer=EQUAL_TIMES)
        assert verdict.passed
        assert verdict.slowdown is not None
        assert (verdict.slowdown.interleaved, verdict.slowdown.rounds) == (False, 60)
        slower = check(request_for(url, baseline=saved, max_slowdown="5%"), timer=drawn_times(1.2, 1.2))
        assert slower.outcome is Outcome.FAILED
        with serving() as another, pytest.raises(InputError) as error:
            check_once(another, baseline=saved)
        assert (error.value.code, error.value.details["differences"]) == (ErrorCode.FILE_MISMATCH, ("host",))


def test_text_outputs_are_compared(tmp_path: Path) -> None:
    saved = tmp_path / "texts.json"
    texts = np.array([["yes", "caf\u00e9", b"\xff"]], np.object_)
    models = {"small": lambda x: texts[:, ::-1], "dense": lambda x: texts, "same": lambda x: texts}
    with serving(models) as url:
        assert check_once(url, model="dense", baseline="same", save_baseline=saved).passed
        assert check_once(url, model="same", baseline=saved).passed
        for baseline in ("dense", saved):
            with pytest.raises(MismatchError) as error:
                check_once(url, baseline=baseline)
            assert error.value.code is ErrorCode.OUTPUTS_DIFFER


def test_a_text_input_has_no_random_values() -> None:
    with serving(inputs={"x": ("BYTES", (-1, 1), np.object_)}) as url, pytest.raises(UsageError) as error:
        check_once(url)
    assert (error.value.code, error.value.details["tensor"]) == (ErrorCode.MISSING_VALUE, "x")
