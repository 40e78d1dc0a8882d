"""Triton's client over HTTP, for servers of the KServe v2 protocol with and without its extensions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

import numpy as np

from compressor.latency.triton_protocols import UNTRUSTED, Connection, Fault, TensorMetadata, header_plugin, split_url

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
            self._client.register_plugin(header_plugin(module, connection.headers))
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
        if UNTRUSTED in str(error):
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
