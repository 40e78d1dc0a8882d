"""A server of the KServe v2 protocol over HTTP, in this process, whose responses a test replaces."""

from __future__ import annotations

import contextlib
import gzip
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.latency.grpc_server import linear

INFER = "/v2/models/small/infer"
BINARY = "binary_tensor_data"
METADATA = {
    "name": "small",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
}
PAGES: Mapping[str, Any] = MappingProxyType({"/v2/models/small": METADATA, "/v2/models/dense": METADATA})
Y = {"name": "y", "datatype": "FP32", "shape": [1, 3]}


@dataclass(frozen=True)
class Request:
    """A request for outputs: its JSON, whether tensors follow it as bytes, and how it is compressed."""

    body: Mapping[str, Any]
    is_binary: bool
    encoding: str | None


def linear_response(x: np.ndarray) -> dict[str, Any]:
    """The response of a model that computes `linear`."""
    return {"outputs": [{**Y, "data": linear(x).ravel().tolist()}]}


@contextmanager
def serving_http(
    pages: Mapping[str, Any] = MappingProxyType({}),
    small: Callable[[np.ndarray], Any] = linear_response,
    status: int = 200,
    byte_seconds: float = 0.0,
    *,
    extensions: Sequence[str] = (),
    headers: Mapping[str, str] = MappingProxyType({}),
    certificate: Path | None = None,
    requests: list[Request] | None = None,
) -> Iterator[str]:
    """A running server; its URL.

    Args:
        pages: content by path that replaces that of `PAGES`: JSON, or raw bytes.
        small: response of the model `small`.
        status: status of that response.
        byte_seconds: seconds between any two bytes of that response.
        extensions: extensions of the protocol that the server lists; without that of bytes it refuses these.
        headers: headers without which a call is denied.
        certificate: file with certificate and key of the server; None: it is not encrypted.
        requests: receives every request for outputs.
    """
    listed = {"/v2": {"name": "fake", "version": "1", "extensions": list(extensions)}}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise every response waits for a delayed acknowledgement

        def do_GET(self) -> None:
            if not self.is_denied():
                self.respond({**PAGES, **listed, **pages}.get(self.path, {}))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.is_denied():
                return
            if self.headers["Content-Encoding"] == "gzip":
                content = gzip.decompress(content)
            length = int(self.headers["Inference-Header-Content-Length"] or len(content))
            body = json.loads(content[:length])
            request = Request(body, is_binary=length < len(content), encoding=self.headers["Content-Encoding"])
            if requests is not None:
                requests.append(request)
            if request.is_binary and BINARY not in extensions:
                self.respond({"error": "not JSON"}, 400)
                return
            data = np.frombuffer(content[length:], np.float32) if request.is_binary else body["inputs"][0]["data"]
            x = np.asarray(data, np.float32).reshape(-1, 4)
            if self.path == INFER:
                self.respond(small(x), status, byte_seconds)
            else:
                self.respond(linear_response(x))

        def is_denied(self) -> bool:
            """Whether a header is missing, which is then answered."""
            denied = any(self.headers[name] != value for name, value in headers.items())
            if denied:
                self.respond({"error": f"denied: {self.headers['Authorization']}"}, 401)
            return denied

        def respond(self, page: Any, status: int = 200, byte_seconds: float = 0.0) -> None:
            content = page if isinstance(page, bytes) else json.dumps(page).encode()
            self.send_response(status)
            if "gzip" in (self.headers["Accept-Encoding"] or "") and self.command == "POST":
                content = gzip.compress(content)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may have closed the connection
                for start in range(len(content)) if byte_seconds else ():
                    self.wfile.write(content[start : start + 1])
                    time.sleep(byte_seconds)
                self.wfile.write(b"" if byte_seconds else content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        scheme = "http" if certificate is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.socket.close()
