"""One interface to Triton's clients over gRPC and HTTP: how a server is called, and the kinds of faults of a call."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from compressor.errors import ErrorCode, UsageError

SCHEMES = ("grpc", "grpcs", "http", "https")
"""Schemes of a server's URL; those that end in `s` are encrypted."""
TensorMetadata = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of an input, as a server describes it."""


class Fault(Enum):
    """The kind of fault that a client's exception reports."""

    REFUSED = auto()
    """The server rejects the request as invalid."""
    TIMEOUT = auto()
    UNREACHABLE = auto()
    """No connection, or it was closed."""
    MALFORMED = auto()
    """The response violates the protocol: it is not HTTP, not JSON, or lacks required keys."""
    FORBIDDEN = auto()
    """The server, or a proxy before it, wants credentials."""
    UNTRUSTED = auto()
    """The certificate of the server is signed by an authority that this machine does not trust."""
    SERVER_FAILED = auto()
    """The server reports an internal error or an unknown status."""


UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""What OpenSSL calls a certificate that it does not trust, in errors of both clients."""

_LONG = 8
"""Characters from which on a part of a header, such as a cookie, is taken for a secret of its own."""


@dataclass(frozen=True)
class Connection:
    """How a server is called.

    Attributes:
        url: `grpc://HOST:PORT`, `grpcs://`, `http://` or `https://`.
        seconds: maximum duration of a call.
        headers: name -> value of headers of every call, e.g. of credentials.
        certificate: file of the authorities (PEM) that may have signed the server's certificate; None: the machine's.
        gzip: whether requests and responses are compressed.
    """

    url: str
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    certificate: Path | None = None
    gzip: bool = False

    @property
    def compression(self) -> str | None:
        """Name of the compression for Triton's clients."""
        return "gzip" if self.gzip else None

    def without_secrets(self, text: str) -> str:
        """A text in which no value of a header occurs, nor its last word, such as a token, nor its longer parts."""
        secrets: set[str] = set()
        for value in self.headers.values():
            parts = re.split(r"[\s;,=]+", value)
            secrets |= {value, value.split()[-1], *(part for part in parts if len(part) >= _LONG)}
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


class TritonProtocol(Protocol):
    """The calls of one of Triton's clients for one model.

    Attributes:
        errors: every exception type that its calls raise.
    """

    errors: tuple[type[Exception], ...]

    def deadline(self) -> contextlib.AbstractContextManager[Any]:
        """A context that bounds the time of one call."""
        ...

    def check_live(self) -> None:
        """Raise one of `errors` unless the server responds."""
        ...

    def is_ready(self) -> bool:
        """Whether the server has loaded the model."""
        ...

    def inputs(self) -> list[TensorMetadata]:
        """The inputs of the model."""
        ...

    def server(self) -> tuple[str, str]:
        """Name and version of the server."""
        ...

    def encode(self, name: str, array: np.ndarray, datatype: str) -> Any:
        """An input of the client's class `InferInput`, in the form that the server reads."""
        ...

    def infer(self, inputs: Sequence[Any]) -> Any:
        """The client's response to one request; the inputs are of its class `InferInput`."""
        ...

    def output_names(self, response: Any) -> list[str]:
        """Names of the outputs in a response."""
        ...

    def fault(self, error: Exception) -> Fault:
        """The kind of fault of one of `errors`."""
        ...

    def reason(self, error: Exception) -> str:
        """The text of one of `errors`; that of the server as it is, where it sent one."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def header_plugin(module: Any, headers: Mapping[str, str]) -> Any:
    """A plugin of Triton's client that adds headers to every call."""

    class AddHeaders(module.InferenceServerClientPlugin):
        def __call__(self, request: Any) -> None:
            request.headers.update(headers)

    return AddHeaders()


def split_url(url: str) -> tuple[str, str]:
    """Scheme and address of a server's URL.

    Raises:
        UsageError: the URL is not `grpc://HOST:PORT`, `grpcs://`, `http://` or `https://`.
    """
    with contextlib.suppress(ValueError):  # the port is not a number
        parts = urlsplit(url)
        if parts.scheme in SCHEMES and parts.hostname and parts.port and not parts.path:
            return parts.scheme, url.partition("://")[2]
    raise UsageError(
        f"--server {url}: invalid address; use grpc://HOST:PORT or http://HOST:PORT, or grpcs:// or https://",
        code=ErrorCode.INVALID_VALUE,
        field="server",
        value=url,
    )
