"""Checks over HTTP: any fault of a response, and any other service on the port, gives one error with a code."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest

from compressor.errors import ErrorCode, InputError, MismatchError, ServerError
from compressor.latency import Verdict, check
from tests.latency.grpc_server import request_for
from tests.latency.http_server import Y, serving_http
from tests.latency.timers import EQUAL_TIMES

pytest.importorskip("tritonclient.http")


def check_once(url: str, **fields: Any) -> Verdict:
    return check(request_for(url, **fields), timer=EQUAL_TIMES)


def test_models_of_a_server_are_compared() -> None:
    with serving_http() as url:
        verdict = check_once(url)
    assert verdict.passed
    assert verdict.host == f"fake 1 at {url.removeprefix('http://')}, over http"
    assert verdict.outputs.expected == "the baseline"


@pytest.mark.parametrize(
    ("response", "code", "tensor"),
    [
        ({"outputs": [{**Y, "data": [0.0, 0.0, 9.0]}]}, ErrorCode.OUTPUTS_DIFFER, None),
        ({"outputs": [{**Y, "data": []}]}, ErrorCode.TENSOR_MISMATCH, "y"),
        ({"outputs": [Y]}, ErrorCode.TENSOR_MISMATCH, "y"),
        ({"outputs": [{**Y, "shape": [0, 3], "data": []}]}, ErrorCode.TENSOR_MISMATCH, "y"),
        ({"outputs": []}, ErrorCode.TENSOR_MISMATCH, None),
        ({}, ErrorCode.TENSOR_MISMATCH, None),
    ],
)
def test_wrong_outputs_are_refused(response: Any, code: ErrorCode, tensor: str | None) -> None:
    with serving_http(small=lambda x: response) as url, pytest.raises(MismatchError) as error:
        check_once(url)
    assert (error.value.code, error.value.details.get("tensor")) == (code, tensor)
    assert error.value.details["model"] == "small"


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("/v2", {}),
        ("/v2/models/small", {}),
        ("/v2/models/small", {"inputs": [{"datatype": "FP32"}]}),
        ("/v2/models/small", {"inputs": None}),
        ("/v2/models/small", []),
        ("/v2/models/small", b"<html>"),
    ],
)
def test_metadata_outside_the_protocol_are_refused(path: str, page: Any) -> None:
    with serving_http({path: page}) as url, pytest.raises(ServerError) as error:
        check_once(url)
    assert (error.value.code, error.value.details["url"]) == (ErrorCode.SERVER_ERROR, url)
    assert "not of the protocol" in str(error.value)


@pytest.mark.parametrize("response", [[], {"outputs": None}, {"outputs": [{"shape": [1, 3]}]}, b"<html>"])
def test_responses_outside_the_protocol_are_refused(response: Any) -> None:
    with serving_http(small=lambda x: response) as url, pytest.raises(ServerError) as error:
        check_once(url)
    assert error.value.code is ErrorCode.SERVER_ERROR


@pytest.mark.parametrize(("status", "code"), [(400, ErrorCode.REQUEST_REFUSED), (500, ErrorCode.SERVER_ERROR)])
def test_a_refused_request_is_reported(status: int, code: ErrorCode) -> None:
    with (
        serving_http(small=lambda x: {"error": "no such model"}, status=status) as url,
        pytest.raises((InputError, ServerError)) as error,
    ):
        check_once(url)
    assert (error.value.code, error.value.details["model"]) == (code, "small")
    assert error.value.exit_code == 10, "the inputs are as the server lists them"
    assert "no such model" in str(error.value)


def test_a_response_that_arrives_slowly_times_out() -> None:
    start = time.monotonic()
    with serving_http(byte_seconds=0.1) as url, pytest.raises(ServerError) as error:
        check_once(url, deadline=0.5)
    assert error.value.code is ErrorCode.SERVER_TIMEOUT
    assert time.monotonic() - start < 30


def test_a_service_without_http_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(ServerError) as error:
            check_once(f"http://127.0.0.1:{listening.getsockname()[1]}", deadline=1.0)
        assert error.value.code is ErrorCode.SERVER_UNREACHABLE
        listening.shutdown(socket.SHUT_RDWR)
