"""Triton's client over gRPC."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from compressor.latency.triton_protocols import UNTRUSTED, Connection, Fault, TensorMetadata, header_plugin, split_url


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
            self._client.register_plugin(header_plugin(module, lower))
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
            "UNAVAILABLE": Fault.UNTRUSTED if UNTRUSTED in str(error) else Fault.UNREACHABLE,
        }
        return faults.get(status, Fault.SERVER_FAILED)

    def reason(self, error: Exception) -> str:
        return str(error)

    def close(self) -> None:
        self._client.close()
