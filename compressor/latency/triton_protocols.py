"""One interface to Triton's clients over gRPC and HTTP, with their exceptions sorted into kinds of faults."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import Enum, auto
from http.client import HTTPException
from typing import Any, Protocol
from urllib.parse import urlsplit

from compressor.errors import ErrorCode, TargetMissingError, UsageError

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
    SERVER_FAILED = auto()
    """The server reports an internal error or an unknown status."""


class TritonProtocol(Protocol):
    """The calls of one of Triton's clients for one model.

    Attributes:
        module: the client's module, for its `InferInput`.
        errors: every exception type that its calls raise.
    """

    module: Any
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

    def infer(self, inputs: Sequence[Any]) -> Any:
        """The client's response to one request; the inputs are of its class `InferInput`."""
        ...

    def output_names(self, response: Any) -> list[str]:
        """Names of the outputs in a response."""
        ...

    def fault(self, error: Exception) -> Fault:
        """The kind of fault of one of `errors`."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class GrpcProtocol:
    """Triton's client over gRPC. Every call of it takes a deadline."""

    def __init__(self, address: str, model: str, version: str, seconds: float) -> None:
        import tritonclient.grpc as module

        self.module: Any = module
        self._exception = module.InferenceServerException
        self.errors: tuple[type[Exception], ...] = (self._exception,)
        self._client, self._seconds = module.InferenceServerClient(address), seconds
        self._model, self._version = model, version

    def deadline(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def check_live(self) -> None:
        self._client.is_server_live(client_timeout=self._seconds)

    def is_ready(self) -> bool:
        return bool(self._client.is_model_ready(self._model, self._version, client_timeout=self._seconds))

    def inputs(self) -> list[TensorMetadata]:
        metadata = self._client.get_model_metadata(self._model, self._version, client_timeout=self._seconds)
        return [(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in metadata.inputs]

    def server(self) -> tuple[str, str]:
        metadata = self._client.get_server_metadata(client_timeout=self._seconds)
        return metadata.name, metadata.version

    def infer(self, inputs: Sequence[Any]) -> Any:
        return self._client.infer(self._model, inputs, self._version, client_timeout=self._seconds)

    def output_names(self, response: Any) -> list[str]:
        return [output.name for output in response.get_response().outputs]

    def fault(self, error: Exception) -> Fault:
        status = str(error.status()).rpartition(".")[2] if isinstance(error, self._exception) else ""
        faults = {
            "INVALID_ARGUMENT": Fault.REFUSED,
            "DEADLINE_EXCEEDED": Fault.TIMEOUT,
            "UNAVAILABLE": Fault.UNREACHABLE,
        }
        return faults.get(status, Fault.SERVER_FAILED)

    def close(self) -> None:
        self._client.close()


_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, HTTPException)


class HttpProtocol:
    """Triton's client over HTTP.

    The client's own timeouts bound a connection and a single read, but a response may take many reads. Therefore a
    deadline bounds the whole call.
    """

    def __init__(self, address: str, model: str, version: str, seconds: float) -> None:
        import gevent
        import tritonclient.http as module
        from geventhttpclient.response import HTTPConnectionClosed

        self.module: Any = module
        self._timeout, self._seconds = gevent.Timeout, seconds
        self._closed = HTTPConnectionClosed
        # geventhttpclient raises what the sockets raise.
        self.errors: tuple[type[Exception], ...] = (module.InferenceServerException, OSError, *_MALFORMED)
        self._client = module.InferenceServerClient(address, connection_timeout=seconds, network_timeout=seconds)
        self._model, self._version = model, version

    def deadline(self) -> contextlib.AbstractContextManager[Any]:
        timeout: contextlib.AbstractContextManager[Any] = self._timeout(self._seconds, TimeoutError("timed out"))
        return timeout

    def check_live(self) -> None:
        self._client.is_server_live()

    def is_ready(self) -> bool:
        return bool(self._client.is_model_ready(self._model, self._version))

    def inputs(self) -> list[TensorMetadata]:
        metadata = self._client.get_model_metadata(self._model, self._version)["inputs"]
        return [(str(entry["name"]), str(entry["datatype"]), tuple(map(int, entry["shape"]))) for entry in metadata]

    def server(self) -> tuple[str, str]:
        metadata = self._client.get_server_metadata()
        return metadata["name"], metadata["version"]

    def infer(self, inputs: Sequence[Any]) -> Any:
        return self._client.infer(self._model, inputs, self._version)

    def output_names(self, response: Any) -> list[str]:
        return [output["name"] for output in response.get_response().get("outputs", [])]

    def fault(self, error: Exception) -> Fault:
        if isinstance(error, self.module.InferenceServerException):
            return Fault.REFUSED if error.status() == "400" else Fault.SERVER_FAILED
        if isinstance(error, TimeoutError):
            return Fault.TIMEOUT
        if isinstance(error, (OSError, self._closed)):
            return Fault.UNREACHABLE
        return Fault.MALFORMED

    def close(self) -> None:
        self._client.close()


def connect(url: str, model: str, version: str, seconds: float) -> TritonProtocol:
    """A client for one model.

    Args:
        url: `grpc://HOST:PORT` or `http://HOST:PORT`.
        model: name of the model.
        version: its version, or empty for the server's choice.
        seconds: maximum duration of a call.

    Raises:
        UsageError: the URL is malformed.
        TargetMissingError: Triton's client is not installed.
    """
    scheme, address = split_url(url)
    try:
        return (GrpcProtocol if scheme == "grpc" else HttpProtocol)(address, model, version, seconds)
    except ImportError as error:
        text = f"--server: Triton's client is not installed ({error})"
        raise TargetMissingError.of_package("tritonclient", "serving", text) from error


def split_url(url: str) -> tuple[str, str]:
    """Scheme and address of a server's URL.

    Raises:
        UsageError: the URL is not `grpc://HOST:PORT` or `http://HOST:PORT`.
    """
    with contextlib.suppress(ValueError):  # the port is not a number
        parts = urlsplit(url)
        if parts.scheme in ("grpc", "http") and parts.hostname and parts.port and not parts.path:
            return parts.scheme, url.partition("://")[2]
    raise UsageError(
        f"--server {url}: invalid address; use grpc://HOST:PORT or http://HOST:PORT",
        code=ErrorCode.INVALID_VALUE,
        field="server",
        value=url,
    )
