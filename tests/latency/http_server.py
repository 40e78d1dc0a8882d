"""A server of the KServe v2 protocol over HTTP, in this process, whose responses a test replaces."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.latency.grpc_server import linear

INFER = "/v2/models/small/infer"
METADATA = {"name": "small", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]}
PAGES: Mapping[str, Any] = MappingProxyType(
    {"/v2": {"name": "fake", "version": "1"}, "/v2/models/small": METADATA, "/v2/models/dense": METADATA}
)
Y = {"name": "y", "datatype": "FP32", "shape": [1, 3]}


def linear_response(x: np.ndarray) -> dict[str, Any]:
    """The response of a model that computes `linear`."""
    return {"outputs": [{**Y, "data": linear(x).ravel().tolist()}]}


@contextmanager
def serving_http(
    pages: Mapping[str, Any] = MappingProxyType({}),
    small: Callable[[np.ndarray], Any] = linear_response,
    status: int = 200,
    byte_seconds: float = 0.0,
) -> Iterator[str]:
    """A running server; its URL.

    Args:
        pages: content by path that replaces that of `PAGES`: JSON, or raw bytes.
        small: response of the model `small`.
        status: status of that response.
        byte_seconds: seconds between any two bytes of that response.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise every response waits for a delayed acknowledgement

        def do_GET(self) -> None:
            self.respond({**PAGES, **pages}.get(self.path, {}))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            x = np.frombuffer(content[int(self.headers["Inference-Header-Content-Length"]) :], np.float32)
            if self.path == INFER:
                self.respond(small(x.reshape(-1, 4)), status, byte_seconds)
            else:
                self.respond(linear_response(x.reshape(-1, 4)))

        def respond(self, page: Any, status: int = 200, byte_seconds: float = 0.0) -> None:
            content = page if isinstance(page, bytes) else json.dumps(page).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may have closed the connection
                for start in range(len(content)) if byte_seconds else ():
                    self.wfile.write(content[start : start + 1])
                    time.sleep(byte_seconds)
                self.wfile.write(b"" if byte_seconds else content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.socket.close()
