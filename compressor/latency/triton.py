"""A model on a Triton inference server, called over gRPC or HTTP, as an endpoint of a check."""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import onnx_ir as ir

from compressor.config.check import CheckRequest
from compressor.errors import ErrorCode, InputError, MismatchError, ServerError, TargetMissingError, UsageError
from compressor.latency.server_faults import (
    HTTP_FAULTS,
    MALFORMED,
    UNTRUSTED,
    Fault,
    certificate_file,
    connection_fault,
)
from compressor.silence_libraries import one_line
from compressor.targets.base import TOLERANCE, Feeds
from compressor.targets.tensor_specs import FREE, spec_from_server
from compressor.targets.trial_inputs import trial_feeds

T = TypeVar("T")
_SCHEMES = ("grpc", "grpcs", "http", "https")
"""Schemes of a server's URL; those that end in `s` are encrypted."""
IDLE_SECONDS = 0.05
"""Pause between rounds: the threads of a server's runtime spin for a while after a call."""
_log = logging.getLogger(__name__)


class TritonModel:
    """A model of a Triton server, or of another server with its protocol (KServe v2).

    Args:
        request: the check, which says how the server is called.
        model: name of the model, or `NAME:VERSION`; without a version the server decides.

    Raises:
        UsageError: the URL or the name is malformed.
        InputError: the certificate cannot be read.
        ServerError: the server does not respond in time, wants credentials, has no such model, or has not loaded it.
        TargetMissingError: Triton's client is not installed.
    """

    graph = None
    tolerance = TOLERANCE["fp16"]
    """The server may compute in half precision."""
    concurrency = 64
    """Enough for a server to form large batches on several GPUs."""
    id_limits: Mapping[str, int] = MappingProxyType({})
    has_random_inputs = True
    """A server knows names, types and shapes of the inputs only."""

    def __init__(self, request: CheckRequest, model: str) -> None:
        name, colon, version = model.partition(":")
        if colon and not (name and version.isdecimal()):
            text = f"{model}: not the name of a served model; use NAME or NAME:VERSION, where VERSION is a number"
            raise UsageError(text, code=ErrorCode.INVALID_VALUE, field="model", value=model)
        self.name, self.url, self._request = model, request.server or "", request
        scheme, address = split_url(self.url)
        protocol = GrpcProtocol if scheme.startswith("grpc") else HttpProtocol
        try:
            self._protocol: GrpcProtocol | HttpProtocol = protocol(request, name, version)
        except ImportError as error:
            text = f"--server: Triton's client is not installed ({error})"
            raise TargetMissingError.of_package("tritonclient", "serving", text) from error
        self._send(self._protocol.check_live)
        # Unlike the check before, this call reports that access is denied.
        software, release = self._send(self._protocol.server)
        if not self._send(self._protocol.is_ready):
            text = f"{self.url}: no model {model!r} is ready there; check the name and the server's log"
            raise ServerError(text, code=ErrorCode.MODEL_NOT_READY, url=self.url, model=model)
        self.inputs = tuple(spec_from_server(*tensor) for tensor in self._send(self._protocol.inputs))
        self.host = f"{software} {release} at {address}, over {scheme}"
        _log.debug("%s on %s takes %s", model, self.host, self.inputs)

    def fitting_length(self, batch: int, longest: int) -> int:
        """`longest`: a server is sent no batch to see whether it fails."""
        return longest

    def trial_batch(self, batch: int, seq: int, seed: int) -> Feeds:
        """A random batch that is valid by the names, types and shapes of the inputs.

        Raises:
            UsageError: an input is text.
        """
        for tensor in self.inputs:
            if tensor.dtype == ir.DataType.STRING:
                text = (
                    f"{self.name}: the input {tensor.name} is text and cannot be random; give an .npz file (--inputs)"
                )
                raise UsageError(text, code=ErrorCode.MISSING_VALUE, field="inputs", tensor=tensor.name)
        inputs = ir.Graph([tensor.value for tensor in self.inputs], [], nodes=[])
        return trial_feeds(ir.Model(inputs, ir_version=10), batch, seq, seed=seed)

    def encode(self, feeds: Feeds) -> list[Any]:
        """The batch as inputs of Triton's client."""
        inputs = []
        for tensor in self.inputs:
            array = np.ascontiguousarray(feeds[tensor.name])
            try:
                inputs.append(self._protocol.encode(tensor.name, array, tensor.type))
            except self._protocol.errors as error:
                text = (
                    f"{self.name}: the input {tensor.name} cannot be sent ({one_line(error)}); use grpc:// for tensors"
                    " that JSON cannot hold"
                )
                raise InputError(text, code=ErrorCode.UNSUPPORTED, tensor=tensor.name) from error
        return inputs

    def call(self, request: list[Any]) -> Any:
        """Send one encoded batch and return the response of Triton's client."""
        return self._send(lambda: self._protocol.infer(request), request)

    def infer(self, request: list[Any]) -> dict[str, np.ndarray]:
        """The outputs of one encoded batch, by name.

        Raises:
            MismatchError: an output has no content, or less than its shape needs.
            ServerError: the server does not respond in time, or not in its protocol.
        """
        response = self.call(request)
        outputs = {}
        for name in self._send(lambda: self._protocol.output_names(response)):
            try:
                array = response.as_numpy(name)
            except (ValueError, TypeError, KeyError, struct.error) as error:
                # The response has no content for the output, or fewer bytes than its shape needs.
                raise self._unreadable(name, f"its content cannot be read ({one_line(error)})") from error
            if array is None:
                raise self._unreadable(name, "it has no content")
            outputs[name] = np.asarray(array)
        return outputs

    def wait_until_idle(self) -> None:
        """Pause, so that the server's threads become idle."""
        time.sleep(IDLE_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        self._protocol.close()

    def _send(self, call: Callable[[], T], request: Sequence[Any] = ()) -> T:
        """Run a call of the protocol within the deadline; errors of the client become errors of this package."""
        try:
            with self._protocol.deadline():
                return call()
        except self._protocol.errors as error:
            fault = self._protocol.fault(error)
            code, _, advice = fault.value
            reason = fault.describe(self._protocol.reason(error), self._request)
            misfit = self._misfit(request) if request and fault is Fault.REFUSED else None
            kind, text = (ServerError if misfit is None else InputError), f"{reason}; {misfit or advice}"
            # The error of the client contains the response, in which a server may repeat headers.
            cause = None if self._request.headers else error
            raise kind(f"{self.url}: {self.name}: {text}", code=code, url=self.url, model=self.name) from cause

    def _misfit(self, request: Sequence[Any]) -> str | None:
        """The first input of a request whose shape differs from the server's, in words; None if none does."""
        for sent, tensor in zip(request, self.inputs, strict=False):
            shape = tuple(sent.shape())
            if len(shape) != len(tensor.dims) or any(
                size not in (FREE, actual) for size, actual in zip(tensor.dims, shape, strict=True)
            ):
                return (
                    f"the input {tensor.name} is {list(shape)}, and the server lists {list(tensor.dims)}; give that"
                    " shape (--inputs, --batch, --seq)"
                )
        return None

    def _unreadable(self, output: str, reason: str) -> MismatchError:
        text = f"{self.name}: output {output}: {reason}; check the model on the server"
        return MismatchError(text, code=ErrorCode.TENSOR_MISMATCH, model=self.name, tensor=output)


class _Protocol:
    """One of Triton's clients, called for one model; `errors` are all exception types that its calls raise."""

    errors: tuple[type[Exception], ...]
    options: Mapping[str, Any] = MappingProxyType({})
    _client: Any

    def __init__(self, request: CheckRequest, model: str, version: str) -> None:
        self._seconds, self._compression = request.deadline, "gzip" if request.gzip else None
        self._model, self._version = model, version

    def deadline(self) -> contextlib.AbstractContextManager[Any]:
        """A context that bounds the time of one call."""
        return contextlib.nullcontext()

    def check_live(self) -> None:
        """Raise one of `errors` unless the server responds."""
        self._client.is_server_live(**self.options)

    def is_ready(self) -> bool:
        """Whether the server has loaded the model."""
        return bool(self._client.is_model_ready(self._model, self._version, **self.options))

    def reason(self, error: Exception) -> str:
        """The text of one of `errors`, or the unchanged text of the server, if it sent any."""
        return str(error)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class GrpcProtocol(_Protocol):
    """Triton's client over gRPC, whose calls take a deadline."""

    def __init__(self, request: CheckRequest, model: str, version: str) -> None:
        super().__init__(request, model, version)
        certificate = certificate_file(request.certificate)
        import tritonclient.grpc as module

        self._module: Any = module
        self._exception = module.InferenceServerException
        self.errors, self.options = (self._exception,), {"client_timeout": self._seconds}
        scheme, address = split_url(request.server or "")
        self._client = module.InferenceServerClient(address, ssl=scheme == "grpcs", root_certificates=certificate)
        # Names of gRPC's metadata are in lower case.
        _add_headers(module, self._client, {name.lower(): value for name, value in request.headers.items()})

    def inputs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of the inputs of the model."""
        metadata = self._client.get_model_metadata(self._model, self._version, **self.options)
        return [(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in metadata.inputs]

    def server(self) -> tuple[str, str]:
        """Name and version of the server."""
        metadata = self._client.get_server_metadata(**self.options)
        return metadata.name, metadata.version

    def encode(self, name: str, array: np.ndarray, datatype: str) -> Any:
        return self._module.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)

    def infer(self, inputs: Sequence[Any]) -> Any:
        options = {**self.options, "compression_algorithm": self._compression}
        return self._client.infer(self._model, inputs, self._version, **options)

    def output_names(self, response: Any) -> list[str]:
        return [output.name for output in response.get_response().outputs]

    def fault(self, error: Exception) -> Fault:
        status = str(error.status()).rpartition(".")[2] if isinstance(error, self._exception) else ""
        faults = {
            "INVALID_ARGUMENT": Fault.REFUSED,
            "DEADLINE_EXCEEDED": Fault.TIMEOUT,
            "UNAUTHENTICATED": Fault.FORBIDDEN,
            "PERMISSION_DENIED": Fault.FORBIDDEN,
            "UNAVAILABLE": Fault.UNTRUSTED if UNTRUSTED in str(error) else Fault.UNREACHABLE,
        }
        return faults.get(status, Fault.SERVER_FAILED)


_BINARY = "binary_tensor_data"
"""Name of the protocol's extension by which tensors follow the JSON of a request as bytes."""


class HttpProtocol(_Protocol):
    """Triton's client over HTTP, for servers of the KServe v2 protocol with and without its extensions.

    The client's timeouts bound a connection and a single read, but a response may take many reads. Therefore a deadline
    bounds the whole call. Tensors are sent and requested as bytes if the server lists that extension of the protocol,
    else in JSON.
    """

    def __init__(self, request: CheckRequest, model: str, version: str) -> None:
        super().__init__(request, model, version)
        certificate = certificate_file(request.certificate)
        import gevent
        import tritonclient.http as module
        from geventhttpclient.response import HTTPConnectionClosed

        self._module: Any = module
        self._timeout = gevent.Timeout
        self._is_binary, self._outputs = False, list[str]()
        self._closed = HTTPConnectionClosed
        # geventhttpclient raises what the sockets raise.
        self.errors = (module.InferenceServerException, OSError, *MALFORMED)
        scheme, address = split_url(request.server or "")
        self._client = module.InferenceServerClient(
            address,
            connection_timeout=request.deadline,
            network_timeout=request.deadline,
            ssl=scheme == "https",
            ssl_options=None if certificate is None else {"ca_certs": certificate},
        )
        _add_headers(module, self._client, request.headers)

    def deadline(self) -> contextlib.AbstractContextManager[Any]:
        return self._timeout(self._seconds, TimeoutError("timed out"))

    def inputs(self) -> list[tuple[str, str, tuple[int, ...]]]:
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
            status = str(error.status())
            return HTTP_FAULTS.get(int(status) if status.isdecimal() else 0, Fault.SERVER_FAILED)
        return Fault.UNREACHABLE if isinstance(error, self._closed) else connection_fault(error)

    def reason(self, error: Exception) -> str:
        if isinstance(error, self._module.InferenceServerException) and error.debug_details():
            # The body is not the error object of the protocol, and the client's message is about that.
            return f"[{error.status()}] {error.debug_details()}"
        return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _add_headers(module: Any, client: Any, headers: Mapping[str, str]) -> None:
    """Let one of Triton's clients send headers with every call."""

    class AddHeaders(module.InferenceServerClientPlugin):
        def __call__(self, request: Any) -> None:
            request.headers.update(headers)

    if headers:
        client.register_plugin(AddHeaders())


def split_url(url: str) -> tuple[str, str]:
    """Scheme and address of a server's URL.

    Raises:
        UsageError: the URL is not `grpc://HOST:PORT`, `grpcs://`, `http://` or `https://`.
    """
    with contextlib.suppress(ValueError):  # the port is not a number
        parts = urlsplit(url)
        if parts.scheme in _SCHEMES and parts.hostname and parts.port and not parts.path:
            return parts.scheme, url.partition("://")[2]
    text = f"--server {url}: invalid address; use grpc://HOST:PORT or http://HOST:PORT, or grpcs:// or https://"
    raise UsageError(text, code=ErrorCode.INVALID_VALUE, field="server", value=url)
