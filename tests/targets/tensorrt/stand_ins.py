"""Stand-ins for TensorRT's builder, parser and runtime, which need a GPU. They record what is requested of them.

Everything else (enums, flags, classes) comes from the real bindings: a name that a version lacks is missing here too.
A serialized engine is the graph that was parsed; ONNX Runtime runs it on the memory of a stand-in driver.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime

REQUESTED: dict[str, Any] = {}
"""Settings of the last build."""
FAILURES: list[str] = []
"""Errors to log; each fails one build or load."""
WARNINGS: list[str] = []
"""Warnings to log before such an error, one each."""
SHORT = "Skipping tactic 0 due to insuficient memory on requested size of 1024 detected for tactic 0x0."
"""TensorRT's warning of a kernel that was skipped for insufficient memory."""
REFUSED: list[str] = []
"""The error to log when a shape is set, which is then refused."""
KNOWN = b"timings"


class Tensor:
    def __init__(self, trt: ModuleType, value: Any) -> None:
        names = {"tensor(float)": "FLOAT", "tensor(int32)": "INT32", "tensor(int64)": "INT64", "tensor(bool)": "BOOL"}
        self.name, self.is_shape_tensor = value.name, False
        self.shape = tuple(-1 if isinstance(size, str) or size is None else size for size in value.shape)
        self.dtype = getattr(trt.DataType, names[value.type])


class Layer:
    def __init__(self, trt: ModuleType, output: Tensor) -> None:
        self.type, self.num_outputs, self.precision = trt.LayerType.SOFTMAX, 1, None
        self.name, self._output = "softmax", output
        self.precision_is_set = False

    def get_output(self, index: int) -> Tensor:
        return self._output


class Network:
    def __init__(self, trt: ModuleType, flags: int) -> None:
        self._trt, self.flags = trt, flags
        self.has_implicit_batch_dimension = False
        self.name = "graph"

    def read(self, path: str) -> None:
        self.path = path
        session = onnxruntime.InferenceSession(path)
        self.inputs = [Tensor(self._trt, value) for value in session.get_inputs()]
        self.outputs = [Tensor(self._trt, value) for value in session.get_outputs()]
        self.layers = [Layer(self._trt, self.outputs[0])]

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))
    num_layers = property(lambda self: len(self.layers))

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]

    def __iter__(self) -> Any:
        return iter(self.layers)


class Cache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def combine(self, cache: Cache, ignore_mismatch: bool) -> bool:
        return True

    def serialize(self) -> Any:
        class Buffer(bytes):
            def __enter__(self) -> Buffer:
                return self

            def __exit__(self, *args: object) -> None: ...

        return Buffer(KNOWN)


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, smallest: Any, usual: Any, largest: Any) -> None:
        self.shapes[name] = [list(smallest), list(usual), list(largest)]


class Config:
    num_optimization_profiles = 1
    DLA_core = -1
    default_device_type = engine_capability = profiling_verbosity = hardware_compatibility_level = None

    def __init__(self) -> None:
        self.flags: set[str] = set()
        REQUESTED.update(flags=self.flags, pools={}, profile=None, cache=None, config=self, tactics=None)

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag.name)

    def get_flag(self, flag: Any) -> bool:
        return flag.name in self.flags

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        REQUESTED["pools"][pool.name] = size

    def get_memory_pool_limit(self, pool: Any) -> int:
        return int(REQUESTED["pools"].get(pool.name, 0))

    def set_tactic_sources(self, mask: int) -> None:
        REQUESTED["tactics"] = mask

    def get_tactic_sources(self) -> int:
        return int(REQUESTED["tactics"] or 0)

    def add_optimization_profile(self, profile: Profile) -> None:
        REQUESTED["profile"] = profile.shapes

    def create_timing_cache(self, data: Any) -> Cache | None:
        return Cache(bytes(data)) if bytes(data) in (b"", KNOWN) else None

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        REQUESTED["cache"] = cache.data.decode()
        self.cache = cache
        return True

    def get_timing_cache(self) -> Cache:
        return self.cache


class Builder:
    trt: ModuleType

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def create_network(self, flags: int = 0) -> Network:
        warnings.warn("a stand-in is deprecated", DeprecationWarning, stacklevel=2)
        members = self.trt.NetworkDefinitionCreationFlag.__members__.items()
        REQUESTED["network"] = [name for name, flag in members if flags & (1 << int(flag))]
        return Network(self.trt, flags)

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        REQUESTED["layers"] = [layer.precision for layer in network.layers]
        if FAILURES:
            if WARNINGS:
                self.logger.log(self.trt.Logger.WARNING, WARNINGS.pop(0))
            self.logger.log(self.trt.Logger.ERROR, FAILURES.pop(0))
            return None
        return bytes(onnx.load(network.path).SerializeToString())


class Parser:
    num_errors = 0

    def __init__(self, network: Network, logger: Any) -> None:
        self.network = network

    def parse_from_file(self, path: str) -> bool:
        self.network.read(path)
        return True


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.shapes, self.addresses = engine, dict[str, Any](), dict[str, int]()

    def set_input_shape(self, name: str, shape: Any) -> bool:
        REQUESTED["set"] = REQUESTED.get("set", 0) + 1
        if REFUSED:
            self.engine.logger.log(self.engine.trt.Logger.ERROR, REFUSED[0])
            return False
        self.engine.logger.log(self.engine.trt.Logger.ERROR, "an error that is logged where nothing fails")
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> Any:
        self.results = self._results()
        return self.results[name].shape

    def _results(self) -> dict[str, np.ndarray]:
        feeds = {}
        for tensor in self.engine.inputs:
            kind = np.dtype(self.engine.trt.nptype(tensor.dtype))
            shape = self.shapes[tensor.name]
            memory = (ctypes.c_char * (kind.itemsize * int(np.prod(shape)))).from_address(self.addresses[tensor.name])
            feeds[tensor.name] = np.frombuffer(memory, kind).reshape(shape)
        names = [tensor.name for tensor in self.engine.outputs]
        return dict(zip(names, self.engine.session.run(names, feeds), strict=True))

    def execute_async_v3(self, stream: int) -> bool:
        for name, result in self._results().items():
            ctypes.memmove(self.addresses[name], np.ascontiguousarray(result).ctypes.data, result.nbytes)
        return True


class Engine:
    trt: ModuleType
    logger: Any
    device_memory_size = device_memory_size_v2 = 1000

    def __init__(self, data: bytes) -> None:
        self.session = onnxruntime.InferenceSession(data)
        self.inputs = [Tensor(self.trt, value) for value in self.session.get_inputs()]
        self.outputs = [Tensor(self.trt, value) for value in self.session.get_outputs()]

    def create_execution_context(self) -> Context:
        return Context(self)

    def get_tensor_dtype(self, name: str) -> Any:
        return next(tensor.dtype for tensor in (*self.inputs, *self.outputs) if tensor.name == name)

    def get_engine_stat(self, statistic: Any) -> int:
        return 2000

    def create_engine_inspector(self) -> Any:
        return self

    def get_engine_information(self, form: Any) -> str:
        return json.dumps({"Layers": [{"Name": "_gemm_mha_v2_0", "LayerType": "kgen", "TacticName": "_gemm_mha_v2"}]})


class Runtime:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        if FAILURES:
            self.logger.log(Engine.trt.Logger.ERROR, FAILURES.pop(0))
            return None
        Engine.logger = self.logger
        return Engine(bytes(data))


def install(trt: ModuleType) -> None:
    """Replace the classes of TensorRT's module."""
    Builder.trt = Engine.trt = trt
    for name, stand_in in {"Builder": Builder, "OnnxParser": Parser, "Runtime": Runtime}.items():
        setattr(trt, name, stand_in)
    trt.init_libnvinfer_plugins = lambda logger, namespace: True  # type: ignore[attr-defined]
