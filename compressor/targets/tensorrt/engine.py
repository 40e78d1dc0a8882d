"""A loaded TensorRT engine, run on the GPU through its driver."""

from __future__ import annotations

import collections
import gc
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from compressor.errors import ErrorCode, InputError
from compressor.results import EngineBuild, QuantizedProducts
from compressor.targets.base import Feeds, Precision
from compressor.targets.cuda import CudaDriver, CudaStream, DeviceBuffer
from compressor.targets.tensor_specs import TensorSpec
from compressor.targets.tensorrt import bindings
from compressor.targets.tensorrt.builder import deserialize
from compressor.targets.tensorrt.log import current_log
from compressor.targets.tensorrt.metadata import EngineMetadata, Shape


class TrtEngine:
    """An engine loaded into TensorRT; see `Engine` for the other attributes. Only one thread at a time may run it.

    Args:
        path: the engine's file.
        engine: TensorRT's engine object, loaded from the file.
        metadata: metadata of the engine, which was built for this GPU and this version of TensorRT.
        driver: the driver of the GPU.
        trt: TensorRT's module.

    Attributes:
        metadata: what the engine was built from and for.
        context: TensorRT's execution context.

    Raises:
        InputError: the GPU has too little memory.
    """

    def __init__(self, path: Path, engine: Any, metadata: EngineMetadata, driver: CudaDriver, trt: ModuleType) -> None:
        self.path, self.metadata = path, metadata
        self.device_seconds: float | None = None
        self._driver, self._trt, self._engine = driver, trt, engine
        driver.enter()
        self.context = engine.create_execution_context()
        if self.context is None:
            size = bindings.activation_bytes(engine)
            raise InputError(
                f"{path}: the GPU has too little memory for the {size / 1e6:.0f} MB that the engine needs besides its"
                " weights; free some, or build it for smaller sizes (--batch, --seq)",
                code=ErrorCode.OUT_OF_MEMORY,
                path=path,
                value=size,
            )
        # Engines are built with full inspector information, which every call would otherwise report to profilers.
        self.context.nvtx_verbosity = trt.ProfilingVerbosity.NONE
        self._stream = CudaStream(driver)
        self._buffers: dict[str, DeviceBuffer] = collections.defaultdict(lambda: DeviceBuffer(driver))
        self._bound: dict[str, tuple[Shape, int]] = {}
        """Input -> shape and address that are set in the context."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(self.metadata.profiles)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Names, element types and shapes of the inputs; an axis is free where the profile has several sizes."""
        return self.metadata.specs

    @property
    def host(self) -> str:
        """Version of TensorRT, and the GPU."""
        return f"{self.session['runtime']} on {self._driver.device}"

    @property
    def is_reentrant(self) -> bool:
        """False: there is one execution context, which one thread at a time may use."""
        return False

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(self.metadata.outputs)

    @property
    def precision(self) -> Precision:
        """Numeric precision of the engine."""
        return self.metadata.precision

    @property
    def attentions(self) -> int:
        """Number of attentions for which it is known whether they are fused."""
        return self.metadata.attentions

    @property
    def fused(self) -> int:
        """Number of fused attentions."""
        return self.metadata.fused

    @property
    def kernels(self) -> Mapping[str, int]:
        """Number of layers by kind."""
        return collections.Counter(layer.kind for layer in self.metadata.built.layers)

    @property
    def optimization(self) -> str:
        """What was done to the graph, in one line."""
        return self.metadata.optimization

    @property
    def session(self) -> Mapping[str, Any]:
        """Runtime, device and options."""
        return self.metadata.session

    @property
    def quantized(self) -> QuantizedProducts | None:
        """The products in 8 bits, as far as TensorRT lists their layers; None: it lists none of them."""
        return self.metadata.quantized

    @property
    def products(self) -> Mapping[str, int]:
        """Number of products with constant weights by precision, where some are in 8 bits; otherwise unknown."""
        return {} if self.quantized is None else self.quantized.by_precision

    @property
    def built(self) -> EngineBuild:
        """Sizes, duration and layers of the build."""
        return self.metadata.built

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; see `Engine.run`.

        Raises:
            InputError: an input is missing or outside of the profile, or the run fails.
        """
        self._check(feeds)
        self._driver.enter()
        arrays = {name: np.ascontiguousarray(feeds[name], self.metadata.inputs[name]) for name in self.inputs}
        for name, array in arrays.items():
            self._bind_input(name, array)
        outputs = {name: self._bind_output(name) for name in self.outputs}
        log, stream = current_log(), self._stream
        stream.record_start()
        started = self.context.execute_async_v3(stream.handle.value or 0)
        stream.record_stop()
        if not started:
            raise InputError(
                f"{self.path}: TensorRT cannot run it on these inputs ({log.summary()})",
                code=ErrorCode.RUNTIME_FAILED,
                path=self.path,
                runtime="tensorrt",
            )
        for name, output in outputs.items():
            self._buffers[name].download(output, stream)
        stream.synchronize()
        self.device_seconds = stream.elapsed_seconds()
        return outputs

    def memory(self, feeds: Feeds) -> int | None:
        """Bytes of GPU memory that a second copy of the engine takes to load and run `feeds`; None: too little is free.

        Raises:
            InputError: an input is missing or outside of the profile.
        """
        self._check(feeds)
        gc.collect()  # memory that is freed during the measurement would be subtracted
        before = self._driver.free_memory()
        try:
            engine = deserialize(self._driver, self.path)
            copy = TrtEngine(self.path, engine, self.metadata, self._driver, self._trt)
            copy.run(feeds)
        except InputError:  # this engine runs, so a copy can only lack memory
            return None
        return max(0, before - self._driver.free_memory())

    def _check(self, feeds: Feeds) -> None:
        self.metadata.check_shapes({name: array.shape for name, array in feeds.items()})

    def _bind_input(self, name: str, array: np.ndarray) -> None:
        """Upload an input, and set its shape and address in the context where they have changed."""
        binding = array.shape, self._buffers[name].upload(array, self._stream)
        if self._bound.get(name) == binding:  # setting a shape again makes the next call slower
            return
        log = current_log()
        if self.context.set_input_shape(name, array.shape) is False:
            raise InputError(
                f"{self.path}: TensorRT refuses the shape {list(array.shape)} of {name} ({log.summary()})",
                code=ErrorCode.TENSOR_MISMATCH,
                path=self.path,
                tensor=name,
                shape=array.shape,
                runtime="tensorrt",
            )
        self.context.set_tensor_address(name, binding[1])
        self._bound[name] = binding

    def _bind_output(self, name: str) -> np.ndarray:
        """Reserve memory for an output on the GPU and on the host, once all inputs have their shapes."""
        shape = tuple(self.context.get_tensor_shape(name))
        if min(shape, default=0) < 0:
            raise InputError(
                f"{self.path}: the shape of {name} depends on values of the inputs, which is not supported; use"
                " --target ort",
                code=ErrorCode.UNSUPPORTED,
                path=self.path,
                tensor=name,
            )
        array = np.empty(shape, self.metadata.outputs[name])
        self.context.set_tensor_address(name, self._buffers[name].reserve(array.nbytes))
        return array
