"""A model on a Triton inference server, as an endpoint of a check."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from compressor.errors import ErrorCode, InputError, MismatchError, ServerError, UsageError
from compressor.latency.triton_protocols import Fault, connect, split_url
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds, Precision
from compressor.targets.tensor_specs import spec_from_server
from compressor.targets.trial_inputs import trial_feeds

T = TypeVar("T")
_IDLE_SECONDS = 0.05
"""Pause between rounds: the threads of a server's runtime spin for a while after a call."""
_CODES = {
    Fault.TIMEOUT: ErrorCode.SERVER_TIMEOUT,
    Fault.UNREACHABLE: ErrorCode.SERVER_UNREACHABLE,
    Fault.MALFORMED: ErrorCode.SERVER_ERROR,
    Fault.SERVER_FAILED: ErrorCode.SERVER_ERROR,
}
_log = logging.getLogger(__name__)


class TritonModel:
    """A model of a Triton server, or of another server with its protocol (KServe v2).

    Args:
        url: `grpc://HOST:PORT` or `http://HOST:PORT`.
        model: name of the model, or `NAME:VERSION`; without a version the server decides.
        deadline: maximum seconds of a call.

    Raises:
        UsageError: the URL or the name is malformed.
        ServerError: the server does not respond in time, has no such model, or has not loaded it.
    """

    precision: Precision = "fp16"
    concurrency = 64
    """Enough for a server to form large batches on several GPUs."""
    id_limits: Mapping[str, int] = MappingProxyType({})

    def __init__(self, url: str, model: str, deadline: float) -> None:
        name, colon, version = model.partition(":")
        if colon and not (name and version.isdecimal()):
            raise UsageError(
                f"{model}: not the name of a served model; use NAME or NAME:VERSION, where VERSION is a number",
                code=ErrorCode.INVALID_VALUE,
                field="model",
                value=model,
            )
        self.name, self.url, self._deadline = model, url, deadline
        self._protocol = connect(url, name, version, deadline)
        self._send(self._protocol.check_live)
        if not self._send(self._protocol.is_ready):
            raise ServerError(
                f"{url}: no model {model!r} is ready there; check the name and the server's log",
                code=ErrorCode.MODEL_NOT_READY,
                url=url,
                model=model,
            )
        self.inputs = tuple(spec_from_server(*tensor) for tensor in self._send(self._protocol.inputs))
        software, release = self._send(self._protocol.server)
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
            encoded = self._protocol.module.InferInput(tensor.name, list(array.shape), tensor.type)
            encoded.set_data_from_numpy(array)
            inputs.append(encoded)
        return inputs

    def call(self, request: list[Any]) -> Any:
        """Send one encoded batch and return the response of Triton's client."""
        return self._send(lambda: self._protocol.infer(request))

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
                raise self._unreadable(name, f"its content cannot be read ({_reason(error)})") from error
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

    def _send(self, call: Callable[[], T]) -> T:
        """Run one call of the protocol within the deadline; raise errors of this package for those of the client."""
        try:
            with self._protocol.deadline():
                return call()
        except self._protocol.errors as error:
            fault, reason = self._protocol.fault(error), _reason(error)
            subject = f"{self.url}: {self.name}:"
            if fault is Fault.REFUSED:
                raise InputError(
                    f"{subject} the server refuses the request ({reason}); check the inputs",
                    code=ErrorCode.REQUEST_REFUSED,
                    url=self.url,
                    model=self.name,
                ) from error
            texts = {
                Fault.TIMEOUT: f"no response within {self._deadline:g} s ({reason}); allow more with --deadline",
                Fault.UNREACHABLE: f"no connection ({reason}); check that the server runs, and its port and protocol",
                Fault.MALFORMED: f"the response is not of the protocol ({reason}); check the port",
                Fault.SERVER_FAILED: f"{reason}; see the server's log",
            }
            raise ServerError(f"{subject} {texts[fault]}", code=_CODES[fault], url=self.url, model=self.name) from error

    def _unreadable(self, output: str, reason: str) -> MismatchError:
        return MismatchError(
            f"{self.name}: output {output}: {reason}; check the model on the server",
            code=ErrorCode.TENSOR_MISMATCH,
            model=self.name,
            tensor=output,
        )


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
