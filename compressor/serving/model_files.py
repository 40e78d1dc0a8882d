"""The files of a served model: which files of a run's folder go into the version folder, for each backend.

The number of instances and of their threads follows from the request, or from the throughput of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import onnx_ir as ir

import graph_passes
from compressor import report as reports
from compressor.config.fields import flag_of
from compressor.config.request import Backend, Device, ServeRequest
from compressor.config.run import definite_fields
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import Note, NoteCode, Report
from compressor.serving import tensorrt_engines
from compressor.serving.inputs import SENTENCE
from compressor.targets import DEFAULT_TARGET, QUANTIZED, cached_target, target, target_of
from compressor.targets.caches import DECODER, ENCODER
from compressor.targets.onnxruntime.sessions import choose_file, engine_of
from compressor.targets.openvino import batches
from compressor.targets.tensor_specs import FREE, TensorSpec, specs_of

GRAPH = "model.onnx"
GENERATION = (
    *("compressor.errors", "compressor.silence_libraries", "compressor.targets.base", "compressor.targets.machine"),
    *("compressor.targets.caches", "compressor.targets.onnxruntime.ort_session"),
    *("compressor.targets.onnxruntime.sessions", "compressor.generation", "compressor.generation.engine_model"),
    *("compressor.generation.runner", "graph_passes.flow.caches"),
)
"""The modules that generate with the graphs of a folder: they import each other, ONNX Runtime, PyTorch and
transformers, and are copied beside a model that generates."""
STREAM_INPUTS = (
    TensorSpec("text_input", ir.DataType.STRING, (1,)),
    TensorSpec("max_tokens", ir.DataType.INT32, (1,)),
    *(TensorSpec(name, ir.DataType.FLOAT, (1,)) for name in ("temperature", "top_p")),
    TensorSpec("top_k", ir.DataType.INT32, (1,)),
    TensorSpec("seed", ir.DataType.INT64, (1,)),
    TensorSpec("stop", ir.DataType.STRING, (FREE,)),
    TensorSpec("chat", ir.DataType.BOOL, (1,)),
)
STREAM_OUTPUTS = (
    TensorSpec("text_output", ir.DataType.STRING, (1,)),
    TensorSpec("tokens", ir.DataType.INT32, (1,)),
)
"""Inputs and outputs of a model that generates: the next part of the text, and the number of tokens so far."""
_BACKEND = Path(__file__).with_name("python_backend")
_RECENT_IR = 10
"""First IR version that ONNX Runtime before 1.18 (May 2024) cannot read."""
_DEFAULT_BATCH, _DEFAULT_LENGTH = 8, 128
"""Maximum batch and length where the run timed none."""


@dataclass(frozen=True)
class Placement:
    """The instances of a model on a server.

    Attributes:
        instances: number of instances, on the CPU or on each GPU.
        threads: threads per call on the CPU; None: the server's runtime decides.
        reason: why there are so many instances, in one line; empty where they were requested, or nothing was measured.
    """

    instances: int = 1
    threads: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, and the facts about them that the server needs.

    Attributes:
        backend: the backend that runs the model.
        device: the device that it runs on.
        graph: the ONNX graph, which determines the valid inputs; None: the model reads text.
        inputs, outputs: inputs and outputs in the types and shapes of the backend.
        max_batch: maximum rows per batch; 0: the server forms no batches.
        lengths: minimum and maximum tokens per row that the model takes, as far as known.
        files: name in the version folder -> path of the file.
        default: name of the model's file in the version folder.
        by_capability: compute capability -> name of its TensorRT engine.
        placement: number of instances and their threads.
        streams: whether the model generates, and sends a text in parts; of its inputs only the first is required.
        parameters: further parameters of the model's file, by name.
        notes: notes for the user of the command.
    """

    backend: Backend
    device: Device
    graph: ir.Model | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int
    lengths: tuple[int, int]
    files: Mapping[str, Path]
    default: str
    by_capability: Mapping[str, str] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    streams: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def find_files(request: ServeRequest) -> ModelFiles:
    """Choose the files to serve.

    Raises:
        InputError: `out` is not the folder of a run, a file of it cannot be used, or there is no TensorRT engine.
        UsageError: the request contradicts what the files permit: batch, device, or the backend's options.
    """
    if not request.out.is_dir():
        text = "no such folder; give the folder of a finished run"
        raise InputError.of_file(request.out, text, ErrorCode.FILE_MISSING)
    report = reports.load(request.out)
    if request.backend in (None, "python") and not request.engine and (request.out / DECODER).is_file():
        return _generating_files(request, report)
    engines = tensorrt_engines.find_engines(request.out, request.engine)
    runtime = target("openvino")
    openvino = request.out / runtime.engine_file
    serves_openvino = report.target == runtime.name and openvino.is_file() and not request.plain
    backend = request.backend or ("tensorrt" if engines else "python" if serves_openvino else "onnxruntime")
    if backend == "tensorrt":
        return _tensorrt_files(request, engines)
    if backend == "python" and serves_openvino:
        return _openvino_files(request, report, openvino)
    return _graph_files(request, report, backend)


def _graph_files(request: ServeRequest, report: Report, backend: Backend) -> ModelFiles:
    """The graph for ONNX Runtime, in the server's ONNX Runtime backend or its Python backend.

    The measured `engine.onnx` has operators of ONNX Runtime's domain, which every build of ONNX Runtime supports.
    """
    engine = request.out / "engine.onnx"
    if report.target == DEFAULT_TARGET and not request.plain and not engine.is_file():
        text = f"missing, as after an interrupted build; build it again: compress build {request.out}"
        raise InputError.of_file(engine, text, ErrorCode.FILE_MISSING)
    path = engine if engine.is_file() and not request.plain else request.out / GRAPH
    graph = graph_passes.load(path)
    device = _device(request, report)
    return _model_files(
        request,
        report,
        (path, graph),
        path,
        backend=backend,
        device=device,
        files=_version_folder(path, graph) | (_python_files("onnxruntime") if backend == "python" else {}),
        serves_measured=report.target == DEFAULT_TARGET and path == engine,
        requirements=_requirements(graph, backend, device),
    )


def _device(request: ServeRequest, report: Report) -> Device:
    """The device of the instances: the requested one, else where the run was measured."""
    measured_on_gpu = target(report.target).needs_device or "CUDA" in str(report.session.get("provider"))
    return request.device or ("gpu" if request.gpus or measured_on_gpu else "cpu")


def _generating_files(request: ServeRequest, report: Report) -> ModelFiles:
    """The graphs with caches, the tokenizer, and the code that generates with them, for the server's Python backend."""
    import transformers

    from compressor.generation.runner import load_engine
    from compressor.model_folder.companions import COMPANIONS

    for name in ("max_batch", "queue_delay", "data"):
        if name in request.model_fields_set and getattr(request, name) is not None:
            raise UsageError(
                f"{flag_of(name)}: a model that generates reads one text at a time, and warms up by itself; omit the "
                f"option, or serve the graph of whole texts (--backend onnxruntime)",
                code=ErrorCode.CONTRADICTION,
                field=name,
            )
    runner = load_engine(request.out, provider="cpu")
    runner.tokenize([SENTENCE])
    network = type(runner.model).__name__
    if not hasattr(transformers, network):
        problem = (
            f"transformers has no class {network}, which the server's Python needs; use a model of a class of "
            f"transformers"
        )
        raise InputError.of_file(request.out, problem, ErrorCode.UNSUPPORTED_MODEL, model_class=network)
    files, device = {"model.py": _BACKEND / "generating_model.py"}, _device(request, report)
    requested = _gpu_flag(request) if request.gpus or request.device else None
    for graph in filter(Path.is_file, (request.out / DECODER, request.out / ENCODER)):
        engine = engine_of(graph)
        source = engine if engine.is_file() and not request.plain else graph
        metadata = graph_passes.load(source).metadata_props
        device, files[graph.name] = choose_file(source, graph, metadata, device, requested)
        files |= {data.name: data for data in graph_passes.data_files(graph_passes.load(files[graph.name]))}
    companions = (file for pattern in COMPANIONS for file in request.out.glob(pattern) if file.is_file())
    files |= {file.relative_to(request.out).as_posix(): file for file in companions}
    text = (
        f"the server's Python needs onnxruntime, torch, transformers {transformers.__version__} and numpy<2, which"
        " Triton's own images lack"
    )
    notes = [Note(text=text, code=NoteCode.SERVER_REQUIREMENT)]
    runtime = cached_target(request.out)
    if runtime.name != DEFAULT_TARGET and not request.plain:
        text = (
            f"{request.out} has engines of {runtime.title} in {runner.sessions.precision}; the server generates with"
            f" ONNX Runtime and {files[DECODER].name} in floats, so speed and numbers differ from the report"
        )
        notes.append(Note(text=text, code=NoteCode.ENGINE_NOT_SERVED))
    return ModelFiles(
        backend="python",
        device=device,
        graph=None,
        inputs=STREAM_INPUTS,
        outputs=STREAM_OUTPUTS,
        max_batch=0,
        lengths=(1, runner.limit or 0),
        files=files | dict(_sources()),
        default="model.py",
        placement=Placement(request.instances or 1, request.threads),
        streams=True,
        parameters={} if runner.limit is None else {"positions": str(runner.limit)},
        notes=tuple(notes),
    )


def _sources() -> Iterator[tuple[str, Path]]:
    """The modules in `GENERATION` and the packages around them, by their paths in the version folder."""
    for module in GENERATION:
        file = Path(str(find_spec(module).origin))  # type: ignore[union-attr]
        parts = module.split(".")
        packages = parts if file.name == "__init__.py" else parts[:-1]
        for end in range(1, len(packages) + 1):
            package = "/".join(packages[:end])
            is_listed = ".".join(packages[:end]) in GENERATION
            if not is_listed:  # the package in this process exports more than the server has
                yield f"{package}/__init__.py", _BACKEND / "__init__.py"
        yield "/".join((*packages, file.name)), file


def _openvino_files(request: ServeRequest, report: Report, engine: Path) -> ModelFiles:
    """The engine for OpenVINO in the server's Python backend.

    Triton's OpenVINO backend compiles a graph for free axes only, and many servers lack it.
    """
    if request.device == "gpu" or request.gpus:
        raise UsageError(
            f"--{_gpu_flag(request)}: OpenVINO engines run on the CPU; omit --{_gpu_flag(request)}, or use --backend "
            f"onnxruntime",
            code=ErrorCode.CONTRADICTION,
            field=_gpu_flag(request),
        )
    path = request.out / GRAPH
    version = str(report.session.get("runtime", "openvino"))
    text = f"the server's Python needs {version} or newer and numpy<2, which Triton's own images lack"
    files = {file.name: file for file in (engine, engine.with_suffix(".bin"))}
    return _model_files(
        request,
        report,
        (path, graph_passes.load(path)),
        engine,
        backend="python",
        device="cpu",
        files={**files, **_python_files("openvino"), "batches.py": Path(batches.__file__)},
        serves_measured=True,
        requirements=[Note(text=text, code=NoteCode.SERVER_REQUIREMENT)],
    )


def _gpu_flag(request: ServeRequest) -> str:
    return "gpus" if request.gpus else "device"


def _model_files(
    request: ServeRequest,
    report: Report,
    source: tuple[Path, ir.Model],
    served: Path,
    *,
    backend: Backend,
    device: Device,
    files: Mapping[str, Path],
    serves_measured: bool,
    requirements: Iterable[Note],
) -> ModelFiles:
    """The files of the engine `served` of the graph `source`, with batches, lengths and instances from the run."""
    path, graph = source
    inputs, outputs = specs_of(graph.graph.inputs, path), specs_of(graph.graph.outputs, path)
    measured_batch = max((speed.batch for speed in report.speeds), default=_DEFAULT_BATCH)
    max_batch = _max_batch(request, (*inputs, *outputs), measured_batch)
    return ModelFiles(
        backend=backend,
        device=device,
        graph=graph,
        inputs=inputs,
        outputs=outputs,
        max_batch=max_batch,
        lengths=_lengths(inputs, report),
        files=files,
        default="model.py" if backend == "python" else GRAPH,
        placement=choose_placement(request, report, device, serves_measured=serves_measured),
        notes=(*requirements, *_limits(request, report, served, max_batch)),
    )


def _python_files(runtime: str) -> dict[str, Path]:
    return {"model.py": _BACKEND / "model.py", "session.py": _BACKEND / f"{runtime}_session.py"}


def _lengths(inputs: Sequence[TensorSpec], report: Report) -> tuple[int, int]:
    """Minimum and maximum tokens per row: the length that the graph fixes, else 1 to the longest measured length."""
    fixed = next((tensor.dims[1] for tensor in inputs if len(tensor.dims) == 2 and tensor.dims[1] != FREE), None)
    longest = max((speed.seq for speed in report.speeds if speed.seq), default=_DEFAULT_LENGTH)
    return (fixed or 1, fixed or longest)


def _requirements(graph: ir.Model, backend: Backend, device: Device) -> Iterator[Note]:
    texts = []
    if (graph.ir_version or 0) >= _RECENT_IR:
        opset = graph.opset_imports.get("", 0)
        texts.append(
            f"the server's ONNX Runtime must support IR version {graph.ir_version} and operator set {opset} of the"
            " graph (IR version 10 needs ONNX Runtime 1.18 of May 2024)"
        )
    if backend == "onnxruntime" and device == "gpu":
        texts.append(
            "config.pbtxt names the accelerator cuda, to turn TensorFloat-32 off; Triton supports it since June 2024"
        )
    if backend == "python":
        texts.append("the server's Python needs onnxruntime and numpy<2, which Triton's own images lack")
    for text in texts:
        yield Note(text=text, code=NoteCode.SERVER_REQUIREMENT)


def _limits(request: ServeRequest, report: Report, path: Path, max_batch: int) -> Iterator[Note]:
    """How the served model differs from the requested or measured model."""
    requested = target(definite_fields(report).get("target") or report.target)
    in_precision = report.precision not in QUANTIZED or path.name != GRAPH
    runs_measured = in_precision and (report.target == DEFAULT_TARGET or target_of(path).name == report.target)
    if not runs_measured and not requested.needs_device:
        yield Note(
            text=f"{request.out} was measured with {target(report.target).title} in {report.precision}; {path.name} is"
            " served with ONNX Runtime, so speed and numbers differ from the report",
            code=NoteCode.ENGINE_NOT_SERVED,
        )
    if requested.needs_device and not request.backend:
        yield Note(
            text=f"{request.out} was made for {requested.title} and has no engine, so ONNX Runtime serves the graph;"
            f" build the engine with compress build {request.out} --target {requested.name}",
            code=NoteCode.ENGINE_MISSING,
        )
    if not max_batch:
        yield Note(text=f"{path} fixes its batch size, so the server forms no batches", code=NoteCode.NO_BATCHING)
    if "kernel" in report.session:
        yield Note(
            text="the run was measured with a compiled kernel; the server computes block-sparse attention with plain"
            " ONNX operators, unless config.pbtxt names a library on its machine (model_operations, of the onnxruntime"
            " backend)",
            code=NoteCode.KERNEL_NOT_SERVED,
        )


def _version_folder(path: Path, graph: ir.Model) -> dict[str, Path]:
    """The graph's files by name; a graph with external weights is a folder, `model.onnx/model.onnx`."""
    weights = graph_passes.data_files(graph)
    if not weights:
        return {GRAPH: path}
    return {f"{GRAPH}/{GRAPH}": path, **{f"{GRAPH}/{file.name}": file for file in sorted(weights)}}


def _tensorrt_files(request: ServeRequest, paths: Sequence[Path]) -> ModelFiles:
    """The TensorRT engines; their metadata determine the inputs, batches and lengths."""
    tensorrt_engines.check_request(request)
    engines = tensorrt_engines.load_engines(request.out, paths)
    path = request.out / GRAPH
    graph = graph_passes.load(path)
    inputs, outputs = engines.first.specs, engines.outputs(specs_of(graph.graph.outputs, path))
    return ModelFiles(
        backend="tensorrt",
        device="gpu",
        graph=graph,
        inputs=inputs,
        outputs=outputs,
        max_batch=_max_batch(request, (*inputs, *outputs), engines.max_batch, limit=engines.max_batch),
        lengths=engines.lengths,
        files=engines.files,
        default=engines.default,
        by_capability=engines.by_capability,
        placement=Placement(request.instances or 1),
        notes=engines.notes,
    )


def _max_batch(request: ServeRequest, tensors: Sequence[TensorSpec], default: int, limit: int | None = None) -> int:
    """Maximum rows per batch, up to `limit`; 0 where the model fixes its batch size, so that the server forms none."""
    requested = request.max_batch
    if not all(tensor.has_batch for tensor in tensors):
        if requested:
            raise UsageError(
                f"--max-batch {requested}: the model in {request.out} fixes its batch size; omit --max-batch",
                code=ErrorCode.CONTRADICTION,
                field="max_batch",
                value=requested,
            )
        return 0
    if limit and requested and requested > limit:
        raise UsageError(
            f"--max-batch {requested}: the engines take at most {limit} rows; use a smaller number, or build them for"
            " more (--batch)",
            code=ErrorCode.OUT_OF_RANGE,
            field="max_batch",
            value=requested,
            maximum=limit,
        )
    return requested or default


def choose_placement(request: ServeRequest, report: Report, device: Device, *, serves_measured: bool) -> Placement:
    """An instance for each caller where several callers had more rows per second in the run, else a single instance.

    Args:
        request: the request, whose numbers of instances and threads have priority.
        serves_measured: whether the server runs the engine that the run measured.
    """
    rows = report.throughputs if serves_measured and device == "cpu" else ()
    if request.instances is not None or request.threads is not None or not rows:
        return Placement(request.instances or 1, request.threads)
    single = max(row.compressed.one_caller for row in rows)
    several = max(rows, key=lambda row: row.compressed.all_callers)
    rates = (
        f"the run measured at most {single:.0f} rows per second with one caller on all cores, and at most"
        f" {several.compressed.all_callers:.0f} with {several.callers} callers on one core each"
    )
    if several.compressed.all_callers <= single:
        return Placement(1, None, f"one instance: {rates}")
    return Placement(several.callers, 1, f"one instance for each of {several.callers} cores, with one thread: {rates}")
