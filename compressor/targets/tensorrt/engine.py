"""TensorRT engines: built with their metadata from a graph, or loaded, and run on the GPU through its driver."""

from __future__ import annotations

import collections
import gc
import logging
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import EngineBuild
from compressor.targets import cuda
from compressor.targets.base import BuildOptions, Engine, Feeds, Precision, Provider
from compressor.targets.cuda import CudaDriver, CudaStream, DeviceBuffer
from compressor.targets.graph_facts import digest, fusible_attentions, graph_digest, matmul_names
from compressor.targets.tensorrt import bindings, inspector
from compressor.targets.tensorrt.builder import EngineBuilder, SerializedEngine, current_log, deserialize, open_cache
from compressor.targets.tensorrt.graph import PreparedGraph, prepare, profile
from compressor.targets.tensorrt.metadata import AMPERE, EngineMetadata, Shape
from graph_passes import load
from graph_passes.quantizers.placement import without_quantizers

_log = logging.getLogger(__name__)


class TrtEngine(Engine):
    """An engine loaded into TensorRT. Only one thread at a time may run it: there is one execution context.

    An axis of an input is free where the profile has several sizes. `attentions` counts those that are known to be
    fused or not, and `quantized` the matmuls whose layers TensorRT lists.

    Args:
        engine: TensorRT's engine object, loaded from the file.
        metadata: metadata of the engine, which was built for this GPU and this version of TensorRT.

    Attributes:
        metadata: what the engine was built from and for.
        context: TensorRT's execution context.

    Raises:
        InputError: the GPU has too little memory.
    """

    def __init__(self, path: Path, engine: Any, metadata: EngineMetadata, driver: CudaDriver, trt: ModuleType) -> None:
        self.metadata = metadata
        self._driver, self._trt, self._engine = driver, trt, engine
        driver.enter()
        self.context = engine.create_execution_context()
        if self.context is None:
            size = bindings.activation_bytes(engine)
            text = (
                f"{path}: the GPU has too little memory for the {size / 1e6:.0f} MB that the engine needs besides its"
                " weights; free some, or build it for smaller sizes (--batch, --seq)"
            )
            raise InputError(text, code=ErrorCode.OUT_OF_MEMORY, path=path, value=size)
        # Every call would otherwise report the layers, which engines are built with, to profilers.
        self.context.nvtx_verbosity = trt.ProfilingVerbosity.NONE
        self._stream = CudaStream(driver)
        self._buffers: dict[str, DeviceBuffer] = collections.defaultdict(lambda: DeviceBuffer(driver))
        self._bound: dict[str, tuple[Shape, int]] = {}
        """Input -> shape and address that are set in the context."""
        super().__init__(
            path=path,
            specs=metadata.specs,
            outputs=tuple(metadata.outputs),
            precision=metadata.precision,
            attentions=metadata.attentions,
            fused=metadata.fused,
            kernels=collections.Counter(layer.kind for layer in metadata.built.layers),
            optimization=metadata.optimization,
            session=metadata.session,
            host=f"{metadata.session['runtime']} on {driver.device}",
            quantized=metadata.quantized,
            products={} if metadata.quantized is None else metadata.quantized.by_precision,
            built=metadata.built,
        )

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; see `Engine.run`. Inputs outside of the profile are refused."""
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
            text = f"{self.path}: TensorRT cannot run it on these inputs ({log.summary()})"
            raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=self.path, runtime="tensorrt")
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
        except InputError:  # this engine runs, so a copy only fails for lack of memory
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
            text = f"{self.path}: TensorRT refuses the shape {list(array.shape)} of {name} ({log.summary()})"
            raise InputError(
                text, code=ErrorCode.TENSOR_MISMATCH, path=self.path, tensor=name, shape=array.shape, runtime="tensorrt"
            )
        self.context.set_tensor_address(name, binding[1])
        self._bound[name] = binding

    def _bind_output(self, name: str) -> np.ndarray:
        """Reserve memory for an output on the GPU and on the host, once all inputs have their shapes."""
        shape = tuple(self.context.get_tensor_shape(name))
        if min(shape, default=0) < 0:
            text = f"the shape of {name} depends on values of the inputs, which is not supported; use --target ort"
            raise InputError.of_file(self.path, text, ErrorCode.UNSUPPORTED, tensor=name)
        array = np.empty(shape, self.metadata.outputs[name])
        self.context.set_tensor_address(name, self._buffers[name].reserve(array.nbytes))
        return array


def build_engine(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
    options: BuildOptions | None = None,
    runtime: tuple[CudaDriver, ModuleType] | None = None,
) -> TrtEngine:
    """Build an engine, write it with its metadata, and load it; see `Target.build`.

    `runtime` has the driver of the GPU and TensorRT's module; None: those of this machine.

    Raises:
        UsageError: the GPU does not support hardware-compatible engines.
        InputError: TensorRT cannot read the graph or cannot build it.
    """
    options, (driver, trt) = options or BuildOptions(), runtime or (cuda.driver(), bindings.library())
    supported = bindings.features(trt)
    if options.hardware_compatible and driver.device.capability < AMPERE:
        raise UsageError(
            f"--hardware-compatible: needs a GPU from Ampere (SM 8.0) on, and this is {driver.device}; omit "
            f"--hardware-compatible",
            code=ErrorCode.UNSUPPORTED,
            field="hardware_compatible",
            value=driver.device.capability,
        )
    profiles = profile(load(onnx), options)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        graph = Path(folder) / "graph.onnx"
        prepared = prepare(onnx, graph, precision, supported)
        cache = open_cache(options.timing_cache, supported.version, driver.device)
        builder = EngineBuilder(trt, supported, driver, options, cache, precision, prepared.quantized)
        start = time.perf_counter()
        serialized = builder.build(graph, profiles)
        seconds = time.perf_counter() - start
    out.write_bytes(serialized.data)
    engine = deserialize(driver, out)
    metadata = _metadata(onnx, out, engine, builder, prepared, serialized, seconds)
    metadata.write(out)
    _log.debug("built %s in %.1f s: %s", out, seconds, metadata.optimization)
    return TrtEngine(out, engine, metadata, driver, trt)


def load_engine(path: Path, metadata: EngineMetadata, driver: CudaDriver, trt: ModuleType) -> TrtEngine:
    """Load an engine that was built earlier, if its metadata match this machine.

    Args:
        path: the engine's file, whose hash has been checked.

    Raises:
        InputError: the engine was built for another GPU or version of TensorRT, or TensorRT cannot load it.
    """
    metadata.check_machine(path, driver.device, bindings.features(trt).version)
    return TrtEngine(path, deserialize(driver, path), metadata, driver, trt)


def _metadata(
    onnx: Path,
    out: Path,
    engine: Any,
    builder: EngineBuilder,
    prepared: PreparedGraph,
    serialized: SerializedEngine,
    seconds: float,
) -> EngineMetadata:
    """The metadata of an engine in the file `out`, which was built from the graph `onnx` in some seconds."""
    trt, device, version = builder.trt, builder.driver.device, builder.supported.version
    listing = engine.create_engine_inspector()
    information = "" if listing is None else listing.get_engine_information(trt.LayerInformationFormat.JSON)
    layers = inspector.parse_layers(information)
    graph = load(onnx)
    outputs = [str(value.name) for value in graph.graph.outputs]
    sites = fusible_attentions(without_quantizers(graph))
    attention = inspector.attention_fusion(layers, sites, device.capability, builder.precision)
    types = inspector.matmul_types(layers, *matmul_names(graph), builder.precision)
    changes = (prepared, f"built by TensorRT {version}", serialized.timings, types, attention)
    return EngineMetadata(
        tensorrt=version,
        gpu=device.name,
        capability=device.capability,
        precision=builder.precision,
        profiles=dict(serialized.profiles),
        inputs={name: bindings.numpy_type(trt, engine, name).name for name in serialized.profiles},
        outputs={name: bindings.numpy_type(trt, engine, name).name for name in outputs},
        engine_hash=digest(out),
        graph_hash=graph_digest(onnx),
        hardware_compatible=builder.options.hardware_compatible,
        version_compatible=builder.options.version_compatible,
        attentions=attention.known,
        fused=attention.fused,
        optimization="; ".join(filter(None, map(str, changes))),
        session=_session(builder, serialized),
        built=EngineBuild(
            seconds=round(seconds, 3),
            engine_bytes=len(serialized.data),
            weight_bytes=bindings.weight_bytes(trt, engine),
            activation_bytes=bindings.activation_bytes(engine),
            attention=str(attention),
            layers=layers,
        ),
        timings=serialized.timings,
        quantized=types.known,
    )


def _session(builder: EngineBuilder, serialized: SerializedEngine) -> dict[str, Any]:
    workspace = serialized.workspace
    return {
        "runtime": f"tensorrt {builder.supported.version}",
        "provider": str(builder.driver.device),
        "precision": builder.precision,
        "types": serialized.types.value,
        "tf32": False,
        "profile": {name: [list(shape) for shape in shapes] for name, shapes in serialized.profiles.items()},
        "workspace": "all that is free" if workspace is None else f"{workspace >> 20} MiB",
        "tactic_sources": list(builder.supported.tactics),
        "hardware_compatible": builder.options.hardware_compatible,
        "version_compatible": builder.options.version_compatible,
    }
