"""One interface to Triton's clients over gRPC and HTTP, with their exceptions sorted into kinds of faults."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError

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


_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""What OpenSSL calls a certificate that it does not trust, in errors of both clients."""


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
        """A text in which no value of a header occurs, nor its last word, such as the token behind `Bearer`."""
        for value in self.headers.values():
            for secret in (value, value.split()[-1]):
                text = text.replace(secret, "***")
        return text


def _plugin(module: Any, headers: Mapping[str, str]) -> Any:
    """A plugin of Triton's client that adds headers to every call."""

    class AddHeaders(module.InferenceServerClientPlugin):  # type: ignore[misc]
        def __call__(self, request: Any) -> None:
            request.headers.update(headers)

    return AddHeaders()


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


class GrpcProtocol:
    """Triton's client over gRPC. Every call of it takes a deadline."""

    def __init__(self, connection: Connection, model: str, version: str) -> None:
        import tritonclient.grpc as module

        self._module: Any = module
        self._exception = module.InferenceServerException
        self.errors: tuple[type[Exception], ...] = (self._exception,)
        scheme, address = split_url(connection.url)
        certificate = None if connection.certificate is None else os.fspath(connection.certificate)
        self._client = module.InferenceServerClient(address, ssl=scheme == "grpcs", root_certificates=certificate)
        if connection.headers:
            # Names of gRPC's metadata are in lower case.
            lower = {name.lower(): value for name, value in connection.headers.items()}
            self._client.register_plugin(_plugin(module, lower))
        self._seconds, self._compression = connection.seconds, connection.compression
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

    def encode(self, name: str, array: np.ndarray, datatype: str) -> Any:
        return self._module.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)

    def infer(self, inputs: Sequence[Any]) -> Any:
        return self._client.infer(
            self._model,
            inputs,
            self._version,
            client_timeout=self._seconds,
            compression_algorithm=self._compression,
        )

    def output_names(self, response: Any) -> list[str]:
        return [output.name for output in response.get_response().outputs]

    def fault(self, error: Exception) -> Fault:
        status = str(error.status()).rpartition(".")[2] if isinstance(error, self._exception) else ""
        faults = {
            "INVALID_ARGUMENT": Fault.REFUSED,
            "DEADLINE_EXCEEDED": Fault.TIMEOUT,
            "UNAUTHENTICATED": Fault.FORBIDDEN,
            "PERMISSION_DENIED": Fault.FORBIDDEN,
            "UNAVAILABLE": Fault.UNTRUSTED if _UNTRUSTED in str(error) else Fault.UNREACHABLE,
        }
        return faults.get(status, Fault.SERVER_FAILED)

    def reason(self, error: Exception) -> str:
        return str(error)

    def close(self) -> None:
        self._client.close()


_BINARY = "binary_tensor_data"
"""Name of the extension by which a server says that tensors may follow the JSON of a request as bytes."""
_HTTP_FAULTS = {
    **dict.fromkeys(("400", "413", "415", "422"), Fault.REFUSED),
    **dict.fromkeys(("401", "403", "407"), Fault.FORBIDDEN),
    **dict.fromkeys(("408", "504"), Fault.TIMEOUT),
}
"""Status of a response -> the kind of fault; any other is an error of the server."""
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, HTTPException)


class HttpProtocol:
    """Triton's client over HTTP.

    The client's own timeouts bound a connection and a single read, but a response may take many reads. Therefore a
    deadline bounds the whole call. Tensors are sent and requested as bytes where the server says that it has that
    extension of the protocol, and in JSON otherwise.
    """

    def __init__(self, connection: Connection, model: str, version: str) -> None:
        import gevent
        import tritonclient.http as module
        from geventhttpclient.response import HTTPConnectionClosed

        self._module: Any = module
        seconds = connection.seconds
        self._timeout, self._seconds = gevent.Timeout, seconds
        self._compression = connection.compression
        self._is_binary, self._outputs = False, list[str]()
        self._closed = HTTPConnectionClosed
        # geventhttpclient raises what the sockets raise.
        self.errors: tuple[type[Exception], ...] = (module.InferenceServerException, OSError, *_MALFORMED)
        scheme, address = split_url(connection.url)
        certificate = connection.certificate
        self._client = module.InferenceServerClient(
            address,
            connection_timeout=seconds,
            network_timeout=seconds,
            ssl=scheme == "https",
            ssl_options=None if certificate is None else {"ca_certs": os.fspath(certificate)},
        )
        if connection.headers:
            self._client.register_plugin(_plugin(module, connection.headers))
        self._model, self._version = model, version

    def deadline(self) -> contextlib.AbstractContextManager[Any]:
        timeout: contextlib.AbstractContextManager[Any] = self._timeout(self._seconds, TimeoutError("timed out"))
        return timeout

    def check_live(self) -> None:
        self._client.is_server_live()

    def is_ready(self) -> bool:
        return bool(self._client.is_model_ready(self._model, self._version))

    def inputs(self) -> list[TensorMetadata]:
        metadata = self._client.get_model_metadata(self._model, self._version)
        inputs = metadata["inputs"]
        self._outputs = [str(entry["name"]) for entry in metadata.get("outputs") or ()]
        return [(str(entry["name"]), str(entry["datatype"]), tuple(map(int, entry["shape"]))) for entry in inputs]

    def server(self) -> tuple[str, str]:
        metadata = self._client.get_server_metadata()
        self._is_binary = _BINARY in (metadata.get("extensions") or ())
        return metadata["name"], metadata["version"]

    def encode(self, name: str, array: np.ndarray, datatype: str) -> Any:
        tensor = self._module.InferInput(name, list(array.shape), datatype)
        return tensor.set_data_from_numpy(array, binary_data=self._is_binary)

    def infer(self, inputs: Sequence[Any]) -> Any:
        in_json = [self._module.InferRequestedOutput(name, binary_data=False) for name in self._outputs]
        return self._client.infer(
            self._model,
            inputs,
            self._version,
            # Without a list the client requests all outputs as bytes.
            outputs=None if self._is_binary else in_json,
            request_compression_algorithm=self._compression,
            response_compression_algorithm=self._compression,
        )

    def output_names(self, response: Any) -> list[str]:
        return [output["name"] for output in response.get_response().get("outputs", [])]

    def fault(self, error: Exception) -> Fault:
        if isinstance(error, self._module.InferenceServerException):
            return _HTTP_FAULTS.get(str(error.status()), Fault.SERVER_FAILED)
        if _UNTRUSTED in str(error):
            return Fault.UNTRUSTED
        if isinstance(error, TimeoutError):
            return Fault.TIMEOUT
        if isinstance(error, (OSError, self._closed)):
            return Fault.UNREACHABLE
        return Fault.MALFORMED

    def reason(self, error: Exception) -> str:
        if isinstance(error, self._module.InferenceServerException) and error.debug_details():
            # The body is not the error object of the protocol, which the client then complains about.
            return f"[{error.status()}] {error.debug_details()}"
        return f"{error} is missing" if isinstance(error, KeyError) else str(error)

    def close(self) -> None:
        self._client.close()


def connect(connection: Connection, model: str, version: str) -> TritonProtocol:
    """A client for one model.

    Args:
        connection: how the server is called.
        model: name of the model.
        version: its version, or empty for the server's choice.

    Raises:
        UsageError: the URL is malformed.
        InputError: the certificate cannot be read.
        TargetMissingError: Triton's client is not installed.
    """
    scheme, _ = split_url(connection.url)
    _check_certificate(connection.certificate)
    try:
        return (GrpcProtocol if scheme.startswith("grpc") else HttpProtocol)(connection, model, version)
    except ImportError as error:
        text = f"--server: Triton's client is not installed ({error})"
        raise TargetMissingError.of_package("tritonclient", "serving", text) from error


def _check_certificate(path: Path | None) -> None:
    """Raise InputError unless a file holds certificates."""
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=os.fspath(path))
    except OSError as error:  # SSLError is one
        raise InputError(
            f"--certificate {path}: no certificates can be read from it ({error}); name a file in PEM with the"
            " certificate of the authority that signed the server's",
            code=ErrorCode.FILE_UNREADABLE if path.is_file() else ErrorCode.FILE_MISSING,
            field="certificate",
            path=path,
        ) from error


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
