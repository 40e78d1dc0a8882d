"""A server of text as server-sent events, in this process, whose bytes a test replaces."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

Piece = bytes | float
"""Bytes to send, or seconds to wait."""
MODELS = {"data": [{"id": "small"}]}


def event(content: Any, name: str = "") -> bytes:
    """An event with JSON, or with a text."""
    data = content if isinstance(content, str) else json.dumps(content)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {data}\n\n".encode()


def completion(text: str | None, **fields: Any) -> bytes:
    """An event of `/v1/completions`."""
    return event({"choices": [{"text": text, "finish_reason": None}], **fields})


def message(text: str | None) -> bytes:
    """An event of `/v1/chat/completions`."""
    return event({"choices": [{"delta": {"role": "assistant", "content": text}}]})


DONE = event("[DONE]")
TEXT = (completion("one"), completion(" two"), completion(""), completion(" three"), DONE)
"""A text of three tokens."""


def usage(tokens: int) -> bytes:
    """The event with the number of tokens, which has no choice."""
    return event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}})


@contextmanager
def serving_events(
    pieces: Sequence[Piece] | Callable[[Mapping[str, Any]], Sequence[Piece]] = TEXT,
    *,
    kind: str = "text/event-stream",
    models: Any = MODELS,
    headers: Mapping[str, str] = MappingProxyType({}),
    refused: Sequence[str] = (),
    status: int = 200,
    is_chunked: bool = False,
    is_cut: bool = False,
    requests: list[dict[str, Any]] | None = None,
) -> Iterator[str]:
    """A running server; its URL without a path.

    Args:
        pieces: what a response consists of, or a function of the request that returns this.
        kind: type of a response.
        models: JSON of the list of models; None: the server has no such list.
        headers: headers without which a call is denied.
        refused: keys that no request may have.
        status: status of a response.
        is_chunked: whether a response is sent in chunks.
        is_cut: whether a response in chunks ends without its last chunk.
        requests: receives every request.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.respond(200 if models is not None else 404, "application/json", [json.dumps(models).encode()])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if requests is not None:
                requests.append(body)
            if any(self.headers[name] != value for name, value in headers.items()):
                self.respond(401, "application/json", [json.dumps({"error": self.headers["Authorization"]}).encode()])
            elif unknown := [name for name in refused if name in body]:
                content = json.dumps({"error": {"message": f"unknown {unknown[0]}"}}).encode()
                self.respond(400, "application/json", [content])
            else:
                self.respond(status, kind, pieces(body) if callable(pieces) else pieces)

        def respond(self, code: int, content_type: str, parts: Sequence[Piece]) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Connection", "close")
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may have closed the connection
                for part in parts:
                    if isinstance(part, float):
                        time.sleep(part)
                    elif is_chunked:
                        self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    else:
                        self.wfile.write(part)
                if is_chunked and not (is_cut and self.command == "POST"):
                    self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.socket.close()
