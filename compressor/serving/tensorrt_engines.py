"""The TensorRT engines of one graph, for one or several GPUs, described by their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor.config.request import ServeRequest
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import Note, NoteCode
from compressor.targets import target
from compressor.targets.graph_facts import graph_digest
from compressor.targets.tensor_specs import TensorSpec
from compressor.targets.tensorrt.metadata import (
    EngineMetadata,
    metadata_path,
    read_metadata,
    runs_engines_of,
    version_numbers,
)

VERSION_COMPATIBLE = ("--backend-config=tensorrt,version-compatible=true",)
"""Options of `tritonserver` that permit version-compatible engines, which contain code."""
_DEFAULT_LENGTHS = (1, 128)


@dataclass(frozen=True)
class EngineSet:
    """Engines of one graph for different compute capabilities.

    Attributes:
        metadata: engine file -> metadata; engines in the folder of the run come first.
    """

    metadata: Mapping[Path, EngineMetadata]

    @property
    def first(self) -> EngineMetadata:
        """Metadata of the first engine."""
        return next(iter(self.metadata.values()))

    @property
    def names(self) -> dict[Path, str]:
        """Name of each engine in the version folder."""
        if len(self.metadata) == 1:
            return dict.fromkeys(self.metadata, "model.plan")
        return {
            path: f"model.sm{''.join(map(str, metadata.capability))}.plan" for path, metadata in self.metadata.items()
        }

    @property
    def files(self) -> dict[str, Path]:
        """The engines and their metadata, by name in the version folder."""
        engines = {name: path for path, name in self.names.items()}
        return engines | {metadata_path(Path(name)).name: metadata_path(path) for name, path in engines.items()}

    @property
    def default(self) -> str:
        """Name of the engine for all remaining GPUs: the first hardware-compatible engine, else the first engine."""
        compatible = (path for path, metadata in self.metadata.items() if metadata.hardware_compatible)
        return self.names[next(compatible, next(iter(self.metadata)))]

    @property
    def by_capability(self) -> dict[str, str]:
        """Name of the engine for each compute capability, e.g. `8.0`."""
        names = self.names
        return {".".join(map(str, metadata.capability)): names[path] for path, metadata in self.metadata.items()}

    @property
    def max_batch(self) -> int:
        """Maximum rows per batch of every engine; 1 where no input has a batch axis."""
        profiles = (shapes for metadata in self.metadata.values() for shapes in metadata.profiles.values())
        return min((maximum[0] for _, _, maximum in profiles if maximum), default=1)

    @property
    def lengths(self) -> tuple[int, int]:
        """Minimum and maximum tokens per row that every engine takes."""
        ranges = [
            (minimum[1], maximum[1])
            for metadata in self.metadata.values()
            for name, (minimum, _, maximum) in metadata.profiles.items()
            if len(minimum) == 2 and name.endswith("input_ids")
        ] or [_DEFAULT_LENGTHS]
        return max(minimum for minimum, _ in ranges), min(maximum for _, maximum in ranges)

    @property
    def newest(self) -> str:
        """The version of TensorRT that the server needs."""
        return max((metadata.tensorrt for metadata in self.metadata.values()), key=version_numbers)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Requirements of the engines on the server."""
        compatible = [metadata.version_compatible for metadata in self.metadata.values()]
        later = ", or with a later one that runs its version-compatible engines" if all(compatible) else ""
        texts = [f"the server needs TensorRT {self.newest}, which built the engine{later}"]
        if any(compatible):
            texts += [f"start the server with {option}, else it refuses the engine" for option in VERSION_COMPATIBLE]
        return tuple(Note(text=text, code=NoteCode.SERVER_REQUIREMENT) for text in texts)

    def outputs(self, of_graph: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The graph's outputs in the types of the engines; integers may be narrower than the graph's."""
        types = {name: ir.DataType.from_numpy(np.dtype(dtype)) for name, dtype in self.first.outputs.items()}
        return tuple(TensorSpec(tensor.name, types[tensor.name], tensor.dims) for tensor in of_graph)


def find_engines(out: Path, more: Sequence[Path]) -> tuple[Path, ...]:
    """The engines in the folder of a run, sorted by name, and additional engines, each once."""
    return tuple({path.resolve(): path for path in (*sorted(out.glob("*.plan")), *more)}.values())


def check_request(request: ServeRequest) -> None:
    """Refuse options that do not apply to TensorRT.

    Raises:
        UsageError: the request names the CPU, the plain graph or a number of threads.
    """
    if request.device == "cpu":
        text = "--device cpu: TensorRT runs on GPUs only; omit --device, or use --backend onnxruntime"
        raise UsageError(text, code=ErrorCode.CONTRADICTION, field="device")
    for field, flag in (("plain", "--plain"), ("threads", f"--threads {request.threads}")):
        if getattr(request, field):
            text = f"{flag}: has no effect on a TensorRT engine; omit {flag}, or use --backend onnxruntime"
            raise UsageError(text, code=ErrorCode.CONTRADICTION, field=field)


def load_engines(out: Path, paths: Sequence[Path]) -> EngineSet:
    """Read and check the metadata of engines. This needs neither TensorRT nor a GPU.

    Args:
        out: folder of a run, which has the graph.

    Raises:
        InputError: there is no engine, or one has no metadata, is damaged, or was built from another graph.
        UsageError: two engines are for the same GPU, or cannot share one configuration or one server.
    """
    if not paths:
        raise InputError.of_file(
            out,
            f"the folder has no TensorRT engine; build one on a machine with the server's GPU (compress build {out}"
            " --target trt), or use --backend onnxruntime",
            ErrorCode.FILE_MISSING,
            field="engine",
        )
    engines = EngineSet({path: read_metadata(path) for path in paths})
    for path, metadata in engines.metadata.items():
        metadata.check_file(path)
        graph = out / (target("trt").quantized_graph(metadata.precision) or "model.onnx")
        if not graph.is_file() or metadata.graph_hash != graph_digest(graph):
            raise InputError.of_file(
                path,
                f"the {metadata.precision} engine was built from another graph than {graph}; build it from "
                f"{graph.name} (compress build {out} --target trt --precision {metadata.precision})",
                ErrorCode.FILE_MISMATCH,
            )
    _check_combination(engines)
    return engines


def _check_combination(engines: EngineSet) -> None:
    """Make sure that a server can serve all engines with one configuration."""
    if len(engines.by_capability) < len(engines.metadata):
        raise _conflict(
            "--engine: two engines are for the same compute capability, and the server would load only one; name one "
            "of them",
            "capability",
        )
    for path, metadata in engines.metadata.items():
        _check_same_server(path, metadata, engines)
    minimum, maximum = engines.lengths
    if minimum > maximum:
        raise _conflict(
            f"--engine: no number of tokens runs on every engine (at least {minimum} on one, at most {maximum} on"
            " another); build all for common sizes (--seq)",
            "profiles",
        )


def _check_same_server(path: Path, metadata: EngineMetadata, engines: EngineSet) -> None:
    """Make sure that an engine needs the same version of TensorRT, precision, types and shapes as the first engine."""
    first, newest = engines.first, engines.newest
    if metadata.tensorrt != newest and not (metadata.version_compatible and runs_engines_of(newest, metadata.tensorrt)):
        raise _conflict(
            f"{path}: this engine needs TensorRT {metadata.tensorrt} and another engine {newest}, and a server has one "
            f"version; build all engines with one version, or with --version-compatible",
            *("tensorrt", path),
        )
    if metadata.precision != first.precision:
        raise _conflict(
            f"{path}: this engine computes in {metadata.precision} and another engine in {first.precision}, so outputs "
            f"would depend on the GPU; build all engines in one precision (--precision)",
            *("precision", path),
        )
    if (metadata.inputs, metadata.outputs) != (first.inputs, first.outputs):
        raise _conflict(
            f"{path}: inputs or outputs have different types than in another engine, and a configuration has one type "
            f"for each; build all engines with one version of TensorRT",
            *("types", path),
        )
    if {tensor.name: tensor.dims for tensor in metadata.specs} != {tensor.name: tensor.dims for tensor in first.specs}:
        raise _conflict(
            f"{path}: the engine fixes different sizes than another engine, and a configuration has one shape for each "
            f"input; build all engines with the same fixed and free sizes (--batch, --seq)",
            *("shapes", path),
        )


def _conflict(message: str, difference: str, path: Path | None = None) -> UsageError:
    return UsageError(message, code=ErrorCode.CONTRADICTION, field="engine", difference=difference, path=path)
