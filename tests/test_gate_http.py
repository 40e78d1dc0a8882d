"""The gate over HTTP, against a server of the KServe v2 protocol that answers as it is told to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from compressor.errors import InputError, MismatchError, ServerError, UsageError
from compressor.latency import check
from tests.served import answer, asked, measured

pytest.importorskip("tritonclient.http")

INFER = "/v2/models/small/infer"
ABOUT = {"name": "small", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]}
PAGES: Mapping[str, Any] = MappingProxyType(
    {"/v2": {"name": "served", "version": "1"}, "/v2/models/small": ABOUT, "/v2/models/dense": ABOUT}
)
Y = {"name": "y", "datatype": "FP32", "shape": [1, 3]}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressor.latency.check.turns", measured(1.0, 1.0))


def result(x: np.ndarray) -> dict[str, Any]:
    return {"outputs": [{**Y, "data": answer(x).ravel().tolist()}]}


@contextmanager
def serving(
    pages: Mapping[str, Any] = MappingProxyType({}),
    small: Callable[[np.ndarray], Any] = result,
    status: int = 200,
    drip: float = 0.0,
) -> Iterator[str]:
    """Its URL.

    Args:
        pages: what to say in place of `PAGES`, by path: JSON, or bytes as they are.
        small: the response of the model `small`.
        status: with which it comes.
        drip: seconds between any two bytes of it.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.say({**PAGES, **pages}.get(self.path, {}))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            x = np.frombuffer(content[int(self.headers["Inference-Header-Content-Length"]) :], np.float32)
            if self.path == INFER:
                self.say(small(x.reshape(-1, 4)), status, drip)
            else:
                self.say(result(x.reshape(-1, 4)))

        def say(self, what: Any, status: int = 200, drip: float = 0.0) -> None:
            content = what if isinstance(what, bytes) else json.dumps(what).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may have gone
                for start in range(len(content)) if drip else ():
                    self.wfile.write(content[start : start + 1])
                    time.sleep(drip)
                self.wfile.write(b"" if drip else content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.socket.close()


def test_models_of_a_server() -> None:
    with serving() as url:
        found = check(asked(url))
    assert found.passed
    assert found.host == f"served 1 at {url.removeprefix('http://')}, over http"
    assert found.answers.expected == "the baseline"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"outputs": [{**Y, "data": [0.0, 0.0, 9.0]}]}, "not those of the baseline"),
        ({"outputs": [{**Y, "data": []}]}, "y is no array"),
        ({"outputs": [Y]}, "y is no array .it lacks 'data'"),
        ({"outputs": [{**Y, "shape": [0, 3], "data": []}]}, "y is empty"),
        ({"outputs": []}, "it gives no outputs"),
        ({}, "it gives no outputs"),
    ],
)
def test_wrong_answers_and_none(wrong: Any, said: str) -> None:
    with serving(small=lambda x: wrong) as url, pytest.raises(MismatchError, match=said):
        check(asked(url))


@pytest.mark.parametrize(
    ("path", "page", "said"),
    [
        ("/v2", {}, "it lacks 'name'"),
        ("/v2/models/small", {}, "it lacks 'inputs'"),
        ("/v2/models/small", {"inputs": [{"datatype": "FP32"}]}, "it lacks 'name'"),
        ("/v2/models/small", {"inputs": None}, "not iterable"),
        ("/v2/models/small", [], "list indices"),
        ("/v2/models/small", b"<html>", "Parse error"),
    ],
)
def test_what_is_not_of_the_protocol_is_one_line(path: str, page: Any, said: str) -> None:
    with (
        serving({path: page}) as url,
        pytest.raises(ServerError, match=f"its answer is not of the protocol .*{said}.*is the server up"),
    ):
        check(asked(url))


@pytest.mark.parametrize("response", [[], {"outputs": None}, {"outputs": [{"shape": [1, 3]}]}, b"<html>"])
def test_responses_that_are_not_of_the_protocol(response: Any) -> None:
    with (
        serving(small=lambda x: response) as url,
        pytest.raises(ServerError, match="its answer is not of the protocol"),
    ):
        check(asked(url))


def test_a_request_that_is_refused() -> None:
    with (
        serving(small=lambda x: {"error": "no such model"}, status=400) as url,
        pytest.raises(InputError, match=r"small refuses the request: \[400\] no such model"),
    ):
        check(asked(url))


def test_an_answer_that_drips_is_given_up() -> None:
    began = time.monotonic()
    with (
        serving(drip=0.1) as url,
        pytest.raises(ServerError, match=r"no answer within 0\.5 s; --deadline allows longer"),
    ):
        check(asked(url, deadline=0.5))
    assert time.monotonic() - began < 30


def test_what_speaks_no_http_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(ServerError, match=r"does not answer, connection closed.*is the server up"):
            check(asked(f"http://127.0.0.1:{listening.getsockname()[1]}", deadline=1.0))
        listening.shutdown(socket.SHUT_RDWR)


def test_scenarios_need_calls_side_by_side() -> None:
    with pytest.raises(UsageError, match="use grpc://"):
        asked("http://127.0.0.1:8000", p99=10.0)
