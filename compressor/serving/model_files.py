"""What of an out folder goes into a model's version folder, for each backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

import graph_passes
from compressor import report as reports
from compressor.config.serve import Backend, Device, ServeRequest
from compressor.errors import InputError, UsageError
from compressor.report import Report
from compressor.serving import tensorrt_engines
from compressor.targets.tensor_specs import FREE, TensorSpec, inputs_of, outputs_of

GRAPH = "model.onnx"
_LATE_IR = 10
"""What servers of some years ago do not read."""
_BATCH, _LENGTH = 8, 128
"""Where nothing was measured."""
_NO_PLAN = "{out} was made for TensorRT and holds no plan: ONNX Runtime is served; compress build {out} --target trt"
_FUNCTION = (
    "the run was measured with a compiled kernel; the server computes block-sparse attention by the function of plain"
    " ONNX, unless config.pbtxt names a library on its machine (model_operations, of the onnxruntime backend)"
)


@dataclass(frozen=True)
class Source:
    """One model's files and what the server must know of them.

    Attributes:
        backend: what runs it.
        device: where.
        graph: the ONNX graph, which says what inputs are valid.
        inputs, outputs: as the backend sees them.
        max_batch: rows of one batch at most; 0: the server forms no batches.
        lengths: tokens of a row, at least and at most, that are known to run.
        files: path in the version folder of every file.
        default: name of the model's file in the version folder.
        by_capability: name of the plan for each compute capability.
        notes: what a reader must know.
    """

    backend: Backend
    device: Device
    graph: ir.Model
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int
    lengths: tuple[int, int]
    files: Mapping[str, Path]
    default: str
    by_capability: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find(asked: ServeRequest) -> Source:
    """Choose the files to serve.

    Raises:
        InputError: no run wrote `out`, a file of it cannot be used, or there is no plan for TensorRT.
        UsageError: a batch or a device was asked for that cannot be.
    """
    if not asked.out.is_dir():
        raise InputError(f"{asked.out}: no such folder; give the folder that a run wrote")
    report = reports.load(asked.out)
    paths = tensorrt_engines.find(asked.out, asked.plans)
    backend = asked.backend or ("tensorrt" if paths else "onnxruntime")
    return _planned(asked, paths) if backend == "tensorrt" else _graph(asked, report, backend)


def _graph(asked: ServeRequest, report: Report, backend: Backend) -> Source:
    """ONNX Runtime, the server's own or in the Python backend: what was measured runs in both, but for a kernel.

    `engine.onnx` has operators of ONNX Runtime's own, which every build of it knows.
    """
    engine = asked.out / "engine.onnx"
    path = engine if engine.is_file() and not asked.plain else asked.out / GRAPH
    graph = graph_passes.load(path)
    files = _laid_out(path, graph)
    if backend == "python":
        files["model.py"] = Path(__file__).with_name("python_model.py")
    on_gpu = report.target == "trt" or "CUDA" in str(report.session.get("provider"))
    inputs, outputs = inputs_of(graph, path), outputs_of(graph, path)
    longest = max((row.seq for row in report.speeds if row.seq), default=_LENGTH)
    fixed = next((tensor.dims[1] for tensor in inputs if len(tensor.dims) == 2 and tensor.dims[1] != FREE), None)
    largest = _max_batch(asked, (*inputs, *outputs), max((row.batch for row in report.speeds), default=_BATCH))
    device: Device = asked.device or ("gpu" if asked.gpus or on_gpu else "cpu")
    return Source(
        backend=backend,
        device=device,
        graph=graph,
        inputs=inputs,
        outputs=outputs,
        max_batch=largest,
        lengths=(fixed or 1, fixed or longest),
        files=files,
        default="model.py" if backend == "python" else GRAPH,
        notes=(
            *_needs(graph, backend, device),
            *((_NO_PLAN.format(out=asked.out),) if report.recipe.get("target") == "trt" and not asked.backend else ()),
            *(() if largest else (f"{path} fixes its batch: the server forms none",)),
            *((_FUNCTION,) if "kernel" in report.session else ()),
        ),
    )


def _needs(graph: ir.Model, backend: Backend, device: Device) -> Iterator[str]:
    """What of the server cannot be taken for granted."""
    opset = graph.opset_imports.get("", 0)
    if (graph.ir_version or 0) >= _LATE_IR:
        yield (
            f"the graph is of IR version {graph.ir_version} and operator set {opset}: the server's ONNX Runtime must"
            " know both (1.18, of May 2024, is the first to know IR version 10)"
        )
    if backend == "onnxruntime" and device == "gpu":
        yield "config.pbtxt names the accelerator cuda, to be told no TF32: Triton knows it since June 2024"
    if backend == "python":
        yield "the server's Python needs onnxruntime and numpy<2; Triton's own images have neither"


def _laid_out(path: Path, graph: ir.Model) -> dict[str, Path]:
    """A graph with weights beside it is a folder of its own, `model.onnx/model.onnx`."""
    weights = graph_passes.data_files(graph)
    if not weights:
        return {GRAPH: path}
    return {f"{GRAPH}/{GRAPH}": path, **{f"{GRAPH}/{file.name}": file for file in sorted(weights)}}


def _planned(asked: ServeRequest, paths: Sequence[Path]) -> Source:
    """TensorRT: the plans' own metadata says what they take."""
    if asked.device == "cpu":
        raise UsageError("--device cpu: TensorRT runs on GPUs only; leave it out, or use --backend onnxruntime")
    for flag, given in (("--plain", asked.plain), (f"--threads {asked.threads}", asked.threads)):
        if given:
            raise UsageError(f"{flag}: means nothing to a TensorRT plan; leave it out, or use --backend onnxruntime")
    found = tensorrt_engines.load(asked.out, paths)
    path = asked.out / GRAPH
    graph = graph_passes.load(path)
    inputs, outputs = found.inputs(), found.outputs(outputs_of(graph, path))
    return Source(
        backend="tensorrt",
        device="gpu",
        graph=graph,
        inputs=inputs,
        outputs=outputs,
        max_batch=_max_batch(asked, (*inputs, *outputs), found.max_batch, limit=found.max_batch),
        lengths=found.lengths,
        files=found.files,
        default=found.default,
        by_capability=found.by_capability,
        notes=found.notes,
    )


def _max_batch(asked: ServeRequest, tensors: Sequence[TensorSpec], usual: int, limit: int | None = None) -> int:
    """Rows of a batch; 0 where the model fixes them, so that the server can form no batches."""
    if not all(tensor.has_batch for tensor in tensors):
        if asked.max_batch:
            raise UsageError(f"--max-batch {asked.max_batch}: the model in {asked.out} fixes its batch; leave it out")
        return 0
    if limit and asked.max_batch and asked.max_batch > limit:
        raise UsageError(
            f"--max-batch {asked.max_batch}: the plans take {limit} rows at most; ask for fewer, or build them for more"
            " (--batch)"
        )
    return asked.max_batch or usual
