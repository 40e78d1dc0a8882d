"""A model on a Triton inference server, as an endpoint of a check."""

from __future__ import annotations

import logging
import os
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError, MismatchError, ServerError, TargetMissingError, UsageError
from compressor.latency.triton_grpc import GrpcProtocol
from compressor.latency.triton_http import HttpProtocol
from compressor.latency.triton_protocols import Connection, Fault, TritonProtocol, split_url
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds, Precision
from compressor.targets.tensor_specs import FREE, spec_from_server
from compressor.targets.trial_inputs import trial_feeds

T = TypeVar("T")
_IDLE_SECONDS = 0.05
"""Pause between rounds: the threads of a server's runtime spin for a while after a call."""
_CODES = {
    Fault.TIMEOUT: ErrorCode.SERVER_TIMEOUT,
    Fault.UNREACHABLE: ErrorCode.SERVER_UNREACHABLE,
    Fault.MALFORMED: ErrorCode.SERVER_ERROR,
    Fault.SERVER_FAILED: ErrorCode.SERVER_ERROR,
    Fault.FORBIDDEN: ErrorCode.ACCESS_DENIED,
    Fault.UNTRUSTED: ErrorCode.CERTIFICATE_UNTRUSTED,
    Fault.REFUSED: ErrorCode.REQUEST_REFUSED,
}
_log = logging.getLogger(__name__)


class TritonModel:
    """A model of a Triton server, or of another server with its protocol (KServe v2).

    Args:
        connection: how the server is called.
        model: name of the model, or `NAME:VERSION`; without a version the server decides.

    Raises:
        UsageError: the URL or the name is malformed.
        ServerError: the server does not respond in time, wants credentials, has no such model, or has not loaded it.
    """

    precision: Precision = "fp16"
    concurrency = 64
    """Enough for a server to form large batches on several GPUs."""
    id_limits: Mapping[str, int] = MappingProxyType({})

    def __init__(self, connection: Connection, model: str) -> None:
        name, colon, version = model.partition(":")
        if colon and not (name and version.isdecimal()):
            raise UsageError(
                f"{model}: not the name of a served model; use NAME or NAME:VERSION, where VERSION is a number",
                code=ErrorCode.INVALID_VALUE,
                field="model",
                value=model,
            )
        url = connection.url
        self.name, self.url, self._connection = model, url, connection
        self._protocol = connect(connection, name, version)
        self._send(self._protocol.check_live)
        # The first call whose refusal the client reports.
        software, release = self._send(self._protocol.server)
        if not self._send(self._protocol.is_ready):
            raise ServerError(
                f"{url}: no model {model!r} is ready there; check the name and the server's log",
                code=ErrorCode.MODEL_NOT_READY,
                url=url,
                model=model,
            )
        self.inputs = tuple(spec_from_server(*tensor) for tensor in self._send(self._protocol.inputs))
        scheme, address = split_url(url)
        self.host = f"{software} {release} at {address}, over {scheme}"
        _log.debug("%s on %s takes %s", model, self.host, self.inputs)

    @property
    def has_random_inputs(self) -> bool:
        """True: a server knows names, types and shapes of the inputs only."""
        return True

    def trial_batch(self, batch: int, seq: int, seed: int) -> Feeds:
        """A random batch that is valid as far as names, types and shapes of the inputs tell.

        Raises:
            UsageError: an input is text.
        """
        for tensor in self.inputs:
            if tensor.dtype == ir.DataType.STRING:
                raise UsageError(
                    f"{self.name}: the input {tensor.name} is text and cannot be random; give an .npz file (--inputs)",
                    code=ErrorCode.MISSING_VALUE,
                    field="inputs",
                    tensor=tensor.name,
                )
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
                raise InputError(
                    f"{self.name}: the input {tensor.name} cannot be sent ({one_line(error)}); send tensors that JSON"
                    " cannot hold over grpc://",
                    code=ErrorCode.UNSUPPORTED,
                    tensor=tensor.name,
                ) from error
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
        time.sleep(_IDLE_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        self._protocol.close()

    def _send(self, call: Callable[[], T], request: Sequence[Any] = ()) -> T:
        """Run one call of the protocol within the deadline; raise errors of this package for those of the client."""
        try:
            with self._protocol.deadline():
                return call()
        except self._protocol.errors as error:
            fault = self._protocol.fault(error)
            reason = self._connection.without_secrets(one_line(self._protocol.reason(error)))
            misfit = self._misfit(request) if request and fault is Fault.REFUSED else None
            texts = {
                Fault.REFUSED: f"the server refuses the request ({reason}); "
                + (misfit or "its inputs have the names, types and shapes that the server lists: see the server's log"),
                Fault.TIMEOUT: f"no response within {self._connection.seconds:g} s ({reason}); allow more with"
                " --deadline",
                Fault.UNREACHABLE: f"no connection ({reason}); check that the server runs, and its port and protocol",
                Fault.MALFORMED: f"the response is not of the protocol ({reason}); check the port",
                Fault.FORBIDDEN: f"the server denies access ({reason}); give the header that it wants, as in"
                ' --header "Authorization: Bearer TOKEN"',
                Fault.UNTRUSTED: f"the server's certificate is not trusted ({reason}); name the file of the authority"
                " that signed it (--certificate)",
                Fault.SERVER_FAILED: f"{reason}; see the server's log",
            }
            kind = ServerError if misfit is None else InputError
            # The error of the client shows the response, in which a server may repeat headers.
            raise kind(
                f"{self.url}: {self.name}: {texts[fault]}", code=_CODES[fault], url=self.url, model=self.name
            ) from (None if self._connection.headers else error)

    def _misfit(self, request: Sequence[Any]) -> str | None:
        """Which input of a request has another shape than the server lists; None if all fit."""
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
        return MismatchError(
            f"{self.name}: output {output}: {reason}; check the model on the server",
            code=ErrorCode.TENSOR_MISMATCH,
            model=self.name,
            tensor=output,
        )


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
