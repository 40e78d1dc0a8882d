"""An engine that TensorRT has loaded, run on the GPU through its driver."""

from __future__ import annotations

import collections
import gc
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from compressor.errors import InputError
from compressor.results import EngineBuild
from compressor.targets.base import Feeds, Precision
from compressor.targets.cuda import Buffer, CudaDriver, Stream
from compressor.targets.tensorrt import bindings, builder
from compressor.targets.tensorrt.metadata import Metadata, Shape


class TrtEngine:
    """An engine loaded into TensorRT; see `Engine` for the attributes. One thread at a time may run it.

    Args:
        path: its file.
        engine: TensorRT's, loaded from it.
        metadata: what it was built for: this GPU and this TensorRT.
        of: the GPU's driver.
        trt: TensorRT's module.

    Raises:
        InputError: the GPU's memory is full.
    """

    def __init__(self, path: Path, engine: Any, metadata: Metadata, of: CudaDriver, trt: ModuleType) -> None:
        self.path, self.metadata = path, metadata
        self.device_seconds: float | None = None
        self._driver, self._trt = of, trt
        of.enter()
        self._engine = engine
        self._context = self._engine.create_execution_context()
        if self._context is None:
            size = bindings.activation_bytes(self._engine)
            raise InputError(
                f"{path}: the GPU has no memory for the {size / 1e6:.0f} MB that it needs beside its weights; free"
                " some, or build it for smaller sizes (--batch, --seq)"
            )
        # Engines are built with all that the inspector can tell, and each call would name its layers for a profiler.
        self._context.nvtx_verbosity = trt.ProfilingVerbosity.NONE
        self._stream = Stream(of)
        self._buffers: dict[str, Buffer] = collections.defaultdict(lambda: Buffer(of))
        self._set: dict[str, tuple[Shape, int]] = {}

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.metadata.profiles)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.metadata.outputs)

    @property
    def precision(self) -> Precision:
        return self.metadata.precision

    @property
    def attentions(self) -> int:
        return self.metadata.attentions

    @property
    def fused(self) -> int:
        return self.metadata.fused

    @property
    def kernels(self) -> Mapping[str, int]:
        return collections.Counter(layer.kind for layer in self.metadata.built.layers)

    @property
    def optimization(self) -> str:
        return self.metadata.optimization

    @property
    def session(self) -> Mapping[str, Any]:
        return self.metadata.session

    @property
    def built(self) -> EngineBuild:
        return self.metadata.built

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """See `Engine`.

        Raises:
            InputError: an input is missing or outside the profile, or the run fails.
        """
        self.metadata.check_shapes({name: array.shape for name, array in feeds.items()})
        self._driver.enter()
        context, stream = self._context, self._stream
        arrays = {name: np.ascontiguousarray(feeds[name], self.metadata.inputs[name]) for name in self.inputs}
        said = builder.listening()
        for name, array in arrays.items():
            given = array.shape, self._buffers[name].upload(array, stream)
            if self._set.get(name) == given:  # a shape that is set anew costs the next call time
                continue
            if context.set_input_shape(name, array.shape) is False:
                raise InputError(f"{self.path}: TensorRT does not take {name} of shape {array.shape} ({said.told()})")
            context.set_tensor_address(name, given[1])
            self._set[name] = given
        results = {name: self._room(name) for name in self.outputs}
        said, handle = builder.listening(), stream.handle.value or 0
        stream.mark(0)
        started = context.execute_async_v3(handle)
        stream.mark(1)
        if not started:
            raise InputError(f"{self.path}: TensorRT cannot run it on these inputs ({said.told()})")
        for name, result in results.items():
            self._buffers[name].download(result, stream)
        stream.wait()
        self.device_seconds = stream.seconds()
        return results

    def memory(self, feeds: Feeds) -> int | None:
        """Bytes of the GPU's memory that loading it once more and running `feeds` takes; None: there is no room.

        Raises:
            InputError: an input is missing or outside the profile.
        """
        self.metadata.check_shapes({name: array.shape for name, array in feeds.items()})
        gc.collect()  # what goes on its own meanwhile would count against it
        before = self._driver.free_memory()
        try:
            loaded = builder.deserialized(self._driver, self.path)
            again = TrtEngine(self.path, loaded, self.metadata, self._driver, self._trt)
            again.run(feeds)
        except InputError:  # it runs as it is: all that a second one can lack is memory
            return None
        return max(0, before - self._driver.free_memory())

    def _room(self, name: str) -> np.ndarray:
        """Where an output goes, on the GPU and here, once all inputs have their sizes."""
        shape = tuple(self._context.get_tensor_shape(name))
        if min(shape, default=0) < 0:
            raise InputError(
                f"{self.path}: the size of {name} depends on what is computed; TensorRT is not run on such"
            )
        array = np.empty(shape, self.metadata.outputs[name])
        self._context.set_tensor_address(name, self._buffers[name].reserve(array.nbytes))
        return array
