"""Endpoints that send text as server-sent events, as sources of tokens for a check.

They are those of the OpenAI protocol, `/v1/completions` and `/v1/chat/completions`, and `generate_stream` of Triton.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import numpy as np

from compressor.config.check import CheckRequest
from compressor.errors import CompressorError, ErrorCode, ServerError, UsageError
from compressor.latency.server_faults import HTTP_FAULTS, MALFORMED, Fault, certificate_file, connection_fault
from compressor.latency.streams import Part, read_stream
from compressor.latency.triton import IDLE_SECONDS
from compressor.targets.base import Feeds
from compressor.targets.relative_error import Outputs

EVENTS = "text/event-stream"
DONE = "[DONE]"
"""Data of the last event of the OpenAI protocol."""
_MAX_BYTES = 1 << 20
"""Longest line of an event, and longest body of an error."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system program question work government number night point home water room mother"
    " area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()
"""Words that are one token in most vocabularies."""
_log = logging.getLogger(__name__)


def read_events(content: io.BufferedIOBase) -> Iterator[tuple[str, str]]:
    """Name and data of each server-sent event, when it arrives (HTML Living Standard, section 9.2.6).

    Raises:
        ValueError: a line is longer than any event.
    """
    name, data = "", list[str]()
    lines = io.TextIOWrapper(cast(Any, content), "utf-8-sig", "replace")
    while line := lines.readline(_MAX_BYTES):
        if len(line) == _MAX_BYTES:
            raise ValueError(f"a line of {_MAX_BYTES} characters or more")
        field, _, value = line.removesuffix("\n").partition(":")  # a comment has an empty field
        value = value.removeprefix(" ")
        if line == "\n":
            if data:
                yield name, "\n".join(data)
            name, data = "", []
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value


@dataclass(frozen=True)
class Protocol:
    """How an endpoint is called, and what its events hold.

    Attributes:
        body: the JSON of a request, from the name of the model, the prompt and the number of new tokens.
        part: the part of the text of an event.
        is_last: whether the text is complete with an event.
        options: options of a request that a server may refuse, and then does not get.
    """

    body: Callable[[str, str, int], dict[str, Any]]
    part: Callable[[Any], Part]
    is_last: Callable[[Any], bool]
    options: Mapping[str, Any]


def _openai(prompt: Callable[[str], dict[str, Any]], text: Callable[[Any], str | None]) -> Protocol:
    """A protocol of OpenAI: the key of a prompt, and the text in a choice of an event."""

    def part(event: Any) -> Part:
        # An event may have several tokens, which the usage counts; that comes in an event without text.
        parts = [text(choice) or "" for choice in event.get("choices") or ()]
        return Part("".join(parts) or None, _count((event.get("usage") or {}).get("completion_tokens")))

    def body(model: str, words: str, new: int) -> dict[str, Any]:
        return {"model": model, **prompt(words), "max_tokens": new, "temperature": 0, "stream": True}

    return Protocol(
        body,
        part,
        lambda event: any(choice.get("finish_reason") for choice in event.get("choices") or ()),
        {"stream_options": {"include_usage": True}, "ignore_eos": True},
    )


def _count(value: Any) -> int | None:
    """A number of tokens in an event, if it has one."""
    return None if value is None else int(value)


def _delta_text(choice: Any) -> str | None:
    """The text of a message; what a model writes before its answer are tokens too."""
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")


PROTOCOLS: Mapping[str, Protocol] = {
    "/chat/completions": _openai(lambda words: {"messages": [{"role": "user", "content": words}]}, _delta_text),
    "/completions": _openai(lambda words: {"prompt": words}, lambda choice: choice.get("text")),
    "/generate_stream": Protocol(
        lambda model, words, new: {"text_input": words, "max_tokens": new, "stream": True},
        lambda event: Part(str(event["text_output"]), _count(event.get("tokens"))),
        lambda event: True,  # the last event is not marked
        {},
    ),
}
"""End of the path of an endpoint -> its protocol."""


class EventSource:
    """An endpoint that sends text as server-sent events; see `TokenSource`.

    Each text has a connection of its own, which exists before its time is measured.

    Args:
        request: the check, which says how the server is called.
        url: the URL of the endpoint; `#NAME` after it names one of several models.

    Raises:
        UsageError: the URL is of no endpoint that is known.
        InputError: the certificate cannot be read.
        ServerError: the server does not respond, wants credentials, has several models, or sends no stream.
    """

    graph = None
    tolerance = 0.0
    vocabulary = 0

    def __init__(self, request: CheckRequest, url: str) -> None:
        self.name, self._request = url, request
        self._url, self._address, ending = _split(url)
        self._protocol = PROTOCOLS[ending]
        self._tls = None
        if self._url.scheme == "https":
            self._tls = ssl.create_default_context(cafile=certificate_file(request.certificate))
        self._model = self._url.fragment
        if not self._model and self._protocol.options:
            self._model = self._only_model(self._url.path.removesuffix(ending) + "/models")
        address = f"{self._address[0]}:{self._address[1]}{self._url.path}"
        self.host = f"{self._model} at {address}" if self._model else address
        self._options = dict(self._protocol.options)
        try:
            read_stream(self, self.prompt(0))
        except ServerError as error:
            if error.code is not ErrorCode.REQUEST_REFUSED or not self._options:
                raise
            _log.debug("%s refuses options: %s", url, error)
            self._options = {}
            read_stream(self, self.prompt(0))

    def prompt(self, number: int) -> Feeds:
        """Random words, as many as a prompt has tokens."""
        draws = np.random.default_rng((self._request.seed, number)).integers(0, len(_WORDS), self._request.lengths[0])
        return {"prompt": np.array([" ".join(_WORDS[draw] for draw in draws)], np.object_)}

    def infer(self, prompt: Feeds) -> Outputs:
        """The text of a prompt."""
        return {"text": np.array([read_stream(self, prompt).text], np.object_)}

    def wait_until_idle(self) -> None:
        """Pause, so that the server's threads become idle."""
        time.sleep(IDLE_SECONDS)

    def stream(self, prompt: Feeds) -> Iterator[Part]:
        """See `TokenSource.stream`; the connection exists when this returns."""
        new = self._request.lengths[1]
        body = self._protocol.body(self._model, prompt["prompt"].item(), new) | self._options
        with self._errors():
            wire = self._connect()
        return self._parts(wire, self._url.path, json.dumps(body).encode(), new)

    def _parts(self, wire: _Wire, path: str, body: bytes, new: int) -> Iterator[Part]:
        complete, count = False, 0
        with self._errors(), contextlib.closing(wire):
            for name, data in self._events(self._respond(wire, "POST", path, body)):
                if data == DONE:
                    complete = True
                    break
                if name == "error":
                    raise self._error(Fault.SERVER_FAILED, _message(data.encode()))
                event = json.loads(data)
                if event.get("error"):
                    raise self._error(Fault.SERVER_FAILED, _message(event))
                complete = complete or self._protocol.is_last(event)
                part = self._protocol.part(event)
                if part.text is not None:
                    count += 1
                    wire.extend()
                yield part
                if max(count, part.tokens or 0) > 2 * new:
                    raise self._error(Fault.MALFORMED, f"more than the {new} tokens that are requested")
        if not complete:
            raise self._error(Fault.ENDED, f"after {count} parts")

    def _only_model(self, path: str) -> str:
        """The name of the model that the server has, which a request names."""
        names = list[str]()
        try:
            with self._errors(), contextlib.closing(self._connect()) as wire:
                response = self._respond(wire, "GET", path, None, kind="application/json")
                names = [str(entry["id"]) for entry in json.loads(response.read(_MAX_BYTES))["data"]]
        except ServerError as error:
            if error.code is not ErrorCode.SERVER_ERROR:
                raise
        if len(names) != 1:
            listed = f"has {len(names)} models, {', '.join(names[:5])}" if names else "lists no models"
            text = f"{self.name}: the server {listed}; name one after the URL: {self.name}#{(names or ['NAME'])[0]}"
            raise UsageError(text, code=ErrorCode.MISSING_VALUE, field="model", value=self.name)
        return names[0]

    def _connect(self) -> _Wire:
        seconds = self._request.deadline
        connection = socket.create_connection(self._address, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_hostname=self._address[0])
        return _Wire(connection, seconds)

    def _respond(self, wire: _Wire, method: str, path: str, body: bytes | None, kind: str = EVENTS) -> HTTPResponse:
        """The response to a request, whose type is `kind`."""
        query = f"?{self._url.query}" if self._url.query else ""
        headers = {"Host": self._url.netloc.rpartition("@")[2], "Accept": kind, "Connection": "close"}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        client = HTTPConnection(*self._address)
        client.sock = received = cast(Any, wire)
        client.request(method, path + query, body, headers | self._request.headers)
        # The client itself would close the connection before the text is read.
        response = HTTPResponse(received, method=method)
        response.begin()
        if response.status != 200:
            fault = HTTP_FAULTS.get(response.status, Fault.SERVER_FAILED)
            raise self._error(fault, f"[{response.status}] {_message(response.read(_MAX_BYTES))}")
        actual = response.headers.get_content_type()
        if actual != kind:
            raise self._error(Fault.NO_STREAM if kind == EVENTS else Fault.MALFORMED, f"it is {actual}")
        return response

    def _events(self, response: HTTPResponse) -> Iterator[tuple[str, str]]:
        try:
            yield from read_events(response)
        except (ConnectionError, IncompleteRead) as error:
            raise self._error(Fault.ENDED, str(error)) from None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of sockets, and of responses outside the protocol, become errors of this package."""
        try:
            yield
        except CompressorError:
            raise
        except (OSError, *MALFORMED) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
            raise self._error(connection_fault(error), reason) from (None if self._request.headers else error)

    def _error(self, fault: Fault, reason: str) -> ServerError:
        code, _, advice = fault.value
        advice = Fault.SERVER_FAILED.value[2] if fault is Fault.REFUSED else advice
        text = f"{self.name}: {fault.describe(reason, self._request)}; {advice}"
        return ServerError(text, code=code, url=self.name, model=self._model)


def _split(url: str) -> tuple[SplitResult, tuple[str, int], str]:
    """The parts of the URL of an endpoint, its host and port, and the end of its path in `PROTOCOLS`.

    Raises UsageError if it is of no endpoint that is known.
    """
    with contextlib.suppress(ValueError):  # the port is not a number
        parts = urlsplit(url)
        ending = next((ending for ending in PROTOCOLS if parts.path.endswith(ending)), None)
        if parts.hostname and ending and parts.scheme in ("http", "https"):
            return parts, (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), ending
    text = (
        f"{url}: not the URL of an endpoint that streams text; name one that ends in {', '.join(PROTOCOLS)}, such as"
        " http://HOST:PORT/v1/completions"
    )
    raise UsageError(text, code=ErrorCode.INVALID_VALUE, field="model", value=url)


def _message(content: Any) -> str:
    """What a server says about an error: a text, or the message in its JSON."""
    if isinstance(content, bytes):
        text = content.decode("utf-8", "replace")
        try:
            content = json.loads(text)
        except ValueError:
            return text
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(key):
            return _message(content[key])
    return content if isinstance(content, str) else json.dumps(content)


class _Wire:
    """A connection with one deadline for all that is read until a part of a text arrives.

    The timeout of a socket bounds a single read, and a server may send single bytes for ever.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._socket, self._seconds = connection, seconds
        self.extend()

    def extend(self) -> None:
        """Let the deadline begin."""
        self._end = time.monotonic() + self._seconds

    def _bound(self) -> socket.socket:
        """The socket, whose next operation ends at the deadline."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(remaining)
        return self._socket

    def sendall(self, content: bytes) -> None:
        """Send a request, with which the deadline begins."""
        self.extend()
        self._bound().sendall(content)

    def makefile(self, mode: str) -> io.BufferedReader:
        """What is received, as the client of Python reads it."""
        wire = self

        class Received(io.RawIOBase):
            def readable(self) -> bool:
                return True

            def readinto(self, buffer: Any) -> int:
                return wire._bound().recv_into(buffer)

        return io.BufferedReader(Received())

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
