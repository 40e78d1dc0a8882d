"""Build a TensorRT engine with its metadata from a graph, and load an engine that was built earlier."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import ErrorCode, UsageError
from compressor.results import EngineBuild
from compressor.targets.base import Precision
from compressor.targets.cuda import CudaDriver
from compressor.targets.graph_facts import digest, fusible_attentions, graph_digest
from compressor.targets.options import BuildOptions
from compressor.targets.quantized_graph import float_products, quantized_products
from compressor.targets.tensorrt import bindings, inspector
from compressor.targets.tensorrt.builder import EngineBuilder, Profiles, SerializedEngine, deserialize
from compressor.targets.tensorrt.engine import TrtEngine
from compressor.targets.tensorrt.graph import PreparedGraph, prepare, profile
from compressor.targets.tensorrt.metadata import AMPERE, EngineMetadata
from compressor.targets.tensorrt.quantized_layers import product_types
from compressor.targets.tensorrt.timing_cache import open_cache
from graph_passes import load
from graph_passes.quantizers.float_view import without_quantizers

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Build:
    """A finished build.

    Attributes:
        builder: the builder, with its options.
        prepared: what was changed in the graph for TensorRT.
        profiles: input name -> smallest, usual and largest shape.
        serialized: the engine.
        seconds: duration of the build.
    """

    builder: EngineBuilder
    prepared: PreparedGraph
    profiles: Profiles
    serialized: SerializedEngine
    seconds: float


def build_engine(
    onnx: Path, out: Path, precision: Precision, options: BuildOptions, driver: CudaDriver, trt: ModuleType
) -> TrtEngine:
    """Build an engine, write it with its metadata, and load it.

    Args:
        onnx: the graph.
        out: the engine's file.
        precision: numeric precision of the engine.
        options: sizes and settings of the build.
        driver: the driver of the GPU.
        trt: TensorRT's module.

    Raises:
        UsageError: the GPU does not support hardware-compatible engines.
        InputError: TensorRT cannot read the graph or cannot build it.
    """
    supported = bindings.features(trt)
    if options.hardware_compatible and driver.device.capability < AMPERE:
        raise UsageError(
            f"--hardware-compatible: needs a GPU from Ampere (SM 8.0) on, and this is {driver.device}",
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
    metadata = _metadata(onnx, out, engine, _Build(builder, prepared, profiles, serialized, seconds))
    metadata.write(out)
    _log.debug("built %s in %.1f s: %s", out, seconds, metadata.optimization)
    return TrtEngine(out, engine, metadata, driver, trt)


def load_engine(path: Path, metadata: EngineMetadata, driver: CudaDriver, trt: ModuleType) -> TrtEngine:
    """Load an engine that was built earlier, if its metadata match this machine.

    Args:
        path: the engine's file, whose hash has been checked.
        metadata: metadata of the engine.
        driver: the driver of the GPU.
        trt: TensorRT's module.

    Raises:
        InputError: the engine was built for another GPU or version of TensorRT, or TensorRT cannot load it.
    """
    metadata.check_machine(path, driver.device, bindings.features(trt).version)
    return TrtEngine(path, deserialize(driver, path), metadata, driver, trt)


def _metadata(onnx: Path, out: Path, engine: Any, build: _Build) -> EngineMetadata:
    """The metadata of a new engine.

    Args:
        onnx: the graph that it was built from.
        out: the engine's file.
        engine: TensorRT's engine object, loaded from the file.
        build: the build.
    """
    builder, serialized = build.builder, build.serialized
    trt, device, version = builder.trt, builder.driver.device, builder.supported.version
    layers = inspector.parse_layers(_layer_information(trt, engine))
    graph = load(onnx)
    outputs = [str(value.name) for value in graph.graph.outputs]
    sites = fusible_attentions(without_quantizers(graph))
    attention = inspector.attention_fusion(layers, sites, device.capability, builder.precision)
    in_8_bits, in_floats = (
        [node.name or "" for node in products(graph)] for products in (quantized_products, float_products)
    )
    types = product_types(layers, in_8_bits, in_floats, builder.precision)
    steps = [
        str(build.prepared),
        f"built by TensorRT {version}",
        *filter(None, (str(serialized.timings), str(types))),
        str(attention),
    ]
    return EngineMetadata(
        tensorrt=version,
        gpu=device.name,
        capability=device.capability,
        precision=builder.precision,
        profiles=dict(build.profiles),
        inputs=_type_names(trt, engine, build.profiles),
        outputs=_type_names(trt, engine, outputs),
        engine_hash=digest(out),
        graph_hash=graph_digest(onnx),
        hardware_compatible=builder.options.hardware_compatible,
        version_compatible=builder.options.version_compatible,
        attentions=attention.known,
        fused=attention.fused,
        optimization="; ".join(steps),
        session=_session(builder, serialized, build.profiles),
        built=EngineBuild(
            seconds=round(build.seconds, 3),
            engine_bytes=len(serialized.data),
            weight_bytes=bindings.weight_bytes(trt, engine),
            activation_bytes=bindings.activation_bytes(engine),
            attention=str(attention),
            layers=layers,
        ),
        timings=serialized.timings,
        quantized=types.known,
    )


def _type_names(trt: ModuleType, engine: Any, names: Iterable[str]) -> dict[str, str]:
    """Input or output -> NumPy's name of its element type."""
    return {name: bindings.numpy_type(trt, engine, name).name for name in names}


def _layer_information(trt: ModuleType, engine: Any) -> str:
    """The JSON of the engine's inspector; empty where the engine has no inspector."""
    engine_inspector = engine.create_engine_inspector()
    if engine_inspector is None:
        return ""
    return str(engine_inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def _session(builder: EngineBuilder, serialized: SerializedEngine, profiles: Profiles) -> dict[str, Any]:
    """Runtime, device and options, as recorded in reports."""
    workspace = serialized.workspace
    return {
        "runtime": f"tensorrt {builder.supported.version}",
        "provider": str(builder.driver.device),
        "precision": builder.precision,
        "types": serialized.types.value,
        "tf32": False,
        "profile": {name: [list(shape) for shape in shapes] for name, shapes in profiles.items()},
        "workspace": "all that is free" if workspace is None else f"{workspace >> 20} MiB",
        "tactic_sources": list(builder.supported.tactics),
        "hardware_compatible": builder.options.hardware_compatible,
        "version_compatible": builder.options.version_compatible,
    }
