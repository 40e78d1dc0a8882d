"""TensorRT 8.6, 10 and 11: an engine for this GPU, with its metadata beside it (differences are in `bindings`)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import TargetMissingError, UsageError
from compressor.results import EngineBuild
from compressor.targets.base import BuildOptions, Precision, Provider
from compressor.targets.cuda import CudaDriver, Device, driver
from compressor.targets.tensorrt import bindings, inspector, timing_cache
from compressor.targets.tensorrt.builder import Profiles, Serialized, deserialized, serialized
from compressor.targets.tensorrt.engine import TrtEngine
from compressor.targets.tensorrt.graph import prepare, profile
from compressor.targets.tensorrt.metadata import AMPERE, Metadata, digest, graph_digest, papers_of, read
from graph_passes import GraphSite, find_attention
from graph_passes import load as load_graph
from graph_passes.passes import Normalize


def missing() -> str | None:
    """What is not here that building and running an engine need, in a few words; None: nothing."""
    try:
        _found()
    except TargetMissingError as error:
        return str(error)
    return None


def check(provider: Provider | None, precision: Precision, kernel: Path | None = None) -> None:
    """Make sure that engines can be built here.

    Raises:
        UsageError: another provider was asked for, a kernel, or numbers that this TensorRT lacks.
        TargetMissingError: there is no GPU, or no TensorRT.
    """
    if provider == "cpu":
        raise UsageError("--provider cpu: TensorRT runs on a GPU; leave it out, or use --target ort")
    if kernel is not None:
        raise UsageError(f"--kernel {kernel}: is for ONNX Runtime on the CPU; leave it out, or use --target ort")
    try:
        _, trt = _found()
    except TargetMissingError as error:
        raise TargetMissingError(
            f"trt: {error}; to build on the machine of the GPU, take the folder of a run there and say compress build"
            " OUT --target trt"
        ) from error
    bindings.api(trt).require(precision)


def build(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
    tuning: BuildOptions | None = None,
) -> TrtEngine:
    """Build an engine, write it with its metadata beside it, and load it. See `Build`."""
    wanted = tuning or BuildOptions()
    check(provider, precision, wanted.kernel)
    of, trt = _found()
    api = bindings.api(trt)
    if wanted.hardware_compatible and of.device.capability < AMPERE:
        raise UsageError(f"--hardware-compatible: is for GPUs from Ampere (SM 8.0) on, and this is {of.device}")
    source = load_graph(onnx)
    sites, profiles = _sites(onnx), profile(source, wanted)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        graph = Path(folder) / "graph.onnx"
        done, quantized = prepare(onnx, graph, precision, api)
        cache = timing_cache.opened(wanted.timing_cache, api.version, of.device)
        started = time.perf_counter()
        made = serialized(trt, api, of, graph, profiles, wanted, cache, precision=precision, quantized=quantized)
        seconds = time.perf_counter() - started
    out.write_bytes(made.plan)
    engine = deserialized(of, out)
    layers = inspector.layers(_inspected(trt, engine))
    fused, attentions, attention = inspector.describe(layers, sites, of.device.capability, precision)
    metadata = Metadata(
        tensorrt=api.version,
        gpu=of.device.name,
        capability=of.device.capability,
        precision=precision,
        profiles=profiles,
        inputs=_types(trt, engine, profiles),
        outputs=_types(trt, engine, (str(value.name) for value in source.graph.outputs)),
        plan=digest(out),
        model=graph_digest(onnx),
        hardware_compatible=wanted.hardware_compatible,
        version_compatible=wanted.version_compatible,
        attentions=attentions,
        fused=fused,
        optimization=f"{done}; built by TensorRT {api.version}{made.timings}; {attention}",
        session=_session(api, of.device, wanted, precision, made, profiles),
        built=EngineBuild(
            seconds=round(seconds, 3),
            plan_bytes=len(made.plan),
            weight_bytes=bindings.weight_bytes(trt, engine),
            activation_bytes=bindings.activation_bytes(engine),
            attention=attention,
            layers=layers,
        ),
    )
    papers_of(out).write_text(metadata.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return TrtEngine(out, engine, metadata, of, trt)


def load(plan: Path) -> TrtEngine:
    """Load an engine that was built before, once its metadata says that it runs here.

    Raises:
        InputError: it has no metadata, is damaged, or is of another GPU or version; TensorRT has not seen it then.
        TargetMissingError: there is no GPU, or no TensorRT.
    """
    metadata = read(plan)
    metadata.check_file(plan)
    check(None, metadata.precision)
    of, trt = _found()
    metadata.check_machine(plan, of.device, bindings.api(trt).version)
    return TrtEngine(plan, deserialized(of, plan), metadata, of, trt)


def _found() -> tuple[CudaDriver, ModuleType]:
    """The GPU and TensorRT. The GPU is looked for first, and not by TensorRT: see `device`."""
    return driver(), bindings.library()


def _types(trt: ModuleType, engine: Any, names: Iterable[str]) -> dict[str, str]:
    """NumPy's names of the types that an engine takes or gives."""
    return {name: bindings.numpy_type(trt, engine, name).name for name in names}


def _sites(onnx: Path) -> Sequence[GraphSite]:
    """The attentions that TensorRT could fuse: block-sparse ones have products that no kernel of its own computes."""
    from compressor.targets.onnxruntime.target import without_block_sparse

    model = load_graph(onnx)
    without_block_sparse(model)
    Normalize()(model)
    return find_attention(model)


def _inspected(trt: ModuleType, engine: Any) -> str:
    inspector = engine.create_engine_inspector()  # none, of an engine that another version's runtime runs
    return "" if inspector is None else str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def _session(
    api: bindings.Api, device: Device, wanted: BuildOptions, precision: Precision, made: Serialized, profiles: Profiles
) -> dict[str, Any]:
    return {
        "runtime": f"tensorrt {api.version}",
        "provider": str(device),
        "precision": precision,
        "types": made.types,
        "tf32": False,
        "profile": {name: [list(shape) for shape in spans] for name, spans in profiles.items()},
        "workspace": "all that is free" if made.workspace is None else f"{made.workspace >> 20} MiB",
        "tactic_sources": list(api.tactics),
        "hardware_compatible": wanted.hardware_compatible,
        "version_compatible": wanted.version_compatible,
    }
