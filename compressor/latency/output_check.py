"""Compare a model's outputs with the expected outputs before and after timing, since wrong outputs may be fast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.errors import ErrorCode, InputError, MismatchError
from compressor.latency.endpoints import cast_inputs
from compressor.latency.local_engine import library_errors
from compressor.latency.streams import CheckedModel
from compressor.latency.verdict import OutputAgreement
from compressor.targets.base import Feeds
from compressor.targets.example_rows import read_arrays
from compressor.targets.onnxruntime.ort_session import unoptimized_runner
from compressor.targets.relative_error import Outputs, ReferenceOutputs
from compressor.targets.tensor_specs import specs_of
from graph_passes import load

ANY, BASELINE = "any", "baseline"
"""Values of `--expect` that name no file."""
_Source = Callable[[int, Feeds], Outputs]
"""Returns the expected outputs of a batch from its number and its inputs."""


@dataclass(frozen=True)
class ExpectedOutputs:
    """The outputs that a model must compute.

    Attributes:
        source: the origin of the expected outputs.
        outputs: the outputs of every batch, by name.
        batches: the inputs of every batch.
        tolerance: maximum relative error.
        exact_integers: whether integers and booleans must be equal.
        shapes_only: whether only shapes and types are compared.
        hint: end of error messages: how to check a model that computes a different function by design.
    """

    source: str
    outputs: Sequence[Outputs]
    batches: Sequence[Feeds]
    tolerance: float
    exact_integers: bool
    shapes_only: bool = False
    hint: str = ""

    def compare(self, model: str, outputs: Sequence[Outputs]) -> OutputAgreement:
        """Compare the outputs of a model for every batch.

        Raises:
            MismatchError: an output is missing, empty, not finite, of another shape or type, or differs.
        """
        for number, batch in enumerate(outputs):
            check_finite(model, number, batch)
        if self.shapes_only:
            for number, batch in enumerate(outputs):
                self._check_shapes(model, number, batch)
            return OutputAgreement(expected=ANY, error=None, tolerance=0.0, batches=len(outputs))
        error = max((self._error(model, number, batch) for number, batch in enumerate(outputs)), default=0.0)
        if error > self.tolerance:
            text = (
                f"{model}: the outputs differ from those of {self.source}: relative error {error:.2g}, at most"
                f" {self.tolerance:g} is permitted{self.hint}"
            )
            raise MismatchError(text, code=ErrorCode.OUTPUTS_DIFFER, model=model, error=error, tolerance=self.tolerance)
        return OutputAgreement(expected=self.source, error=error, tolerance=self.tolerance, batches=len(outputs))

    def _error(self, model: str, number: int, outputs: Outputs) -> float:
        missing = self.outputs[number].keys() - outputs.keys()
        if missing:
            text = (
                f"{model}: {self.source} has the output {', '.join(sorted(missing))}, which the model lacks; it has"
                f" {', '.join(sorted(outputs))}"
            )
            raise MismatchError(text, code=ErrorCode.TENSOR_MISMATCH, model=model, tensors=tuple(sorted(missing)))
        largest = 0.0
        for name, expected in self.outputs[number].items():
            error = self._reference.error(number, name, outputs[name])
            is_integer = expected.dtype.kind in "biu" and expected.shape == outputs[name].shape
            if error and is_integer and self.exact_integers:
                raise MismatchError(
                    f"{model}: the outputs differ from those of {self.source}: {name} (batch {number}) holds integers,"
                    f" which must be equal; permit a relative error with --tolerance{self.hint}",
                    code=ErrorCode.OUTPUTS_DIFFER,
                    model=model,
                    tensor=name,
                    batch=number,
                    error=error,
                    tolerance=0.0,
                )
            largest = max(largest, error)
        return largest

    @functools.cached_property
    def _reference(self) -> ReferenceOutputs:
        return ReferenceOutputs(self.outputs, self.batches)

    def _check_shapes(self, model: str, number: int, outputs: Outputs) -> None:
        for name, expected in self.outputs[number].items():
            output = outputs.get(name)
            if output is None or output.shape != expected.shape or output.dtype != expected.dtype:
                actual = "missing" if output is None else f"{output.dtype} {list(output.shape)}"
                raise MismatchError(
                    f"{model}: output {name} (batch {number}) is {actual}, that of {self.source} is {expected.dtype}"
                    f" {list(expected.shape)}",
                    code=ErrorCode.TENSOR_MISMATCH,
                    model=model,
                    tensor=name,
                    batch=number,
                    shape=None if output is None else output.shape,
                    expected=expected.shape,
                )


def expected_outputs(
    endpoint: CheckedModel,
    batches: Sequence[Feeds],
    baseline: Sequence[Outputs],
    expect: str | None,
    tolerance: float | None,
) -> ExpectedOutputs:
    """The outputs that a model must compute for every batch.

    Args:
        expect: `baseline`; `any`: the shapes and types of the baseline; an `.npz` of outputs `[row, ...]` by name; an
            ONNX file, or a folder with a `model.onnx`, to run here; for a model that generates, a folder with
            `decoder.onnx`. None: a graph on this machine is compared with its outputs without optimization, a server's
            model with the baseline's outputs.
        tolerance: maximum relative error; None: that of the model, and equality for integers.

    Raises:
        InputError: the file is missing, unreadable, or has too few rows.
    """
    hint = "; if it computes a different function by design, give --expect OUT or --expect any"
    if expect is None and endpoint.graph is not None:
        source, outputs_of, hint = "its own unoptimized graph", _run_graph(endpoint.graph), ""
    elif expect is None or expect in (BASELINE, ANY):
        source, outputs_of = "the baseline", lambda number, _: baseline[number]
    else:
        source, outputs_of = expect, _read_expected(Path(expect), generates=generates(endpoint.graph))
    return ExpectedOutputs(
        source=source,
        outputs=[outputs_of(number, batch) for number, batch in enumerate(batches)],
        batches=batches,
        tolerance=endpoint.tolerance if tolerance is None else tolerance,
        exact_integers=tolerance is None,
        shapes_only=expect == ANY,
        hint=hint,
    )


def check_finite(model: str, number: int, outputs: Outputs) -> None:
    """Make sure that a batch has outputs, none of them empty, and only finite numbers.

    Raises:
        MismatchError: there are no outputs, or an output is empty or holds NaN or infinity.
    """
    for name, array in outputs.items():
        if array.size == 0:
            fault, code = f"output {name} is empty", ErrorCode.TENSOR_MISMATCH
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            fault, code = f"output {name} holds NaN or infinity", ErrorCode.NOT_FINITE
        else:
            continue
        raise MismatchError(f"{model}: {fault} (batch {number})", code=code, model=model, tensor=name, batch=number)
    if not outputs:
        text, code = f"{model}: there are no outputs (batch {number})", ErrorCode.TENSOR_MISMATCH
        raise MismatchError(text, code=code, model=model, tensor=None, batch=number)


def generates(graph: Path | None) -> bool:
    """Whether the graph of a model is a folder, which has several: the model generates."""
    return graph is not None and graph.is_dir()


def _read_expected(path: Path, *, generates: bool) -> _Source:
    """Expected outputs from an .npz file, or from a graph or the graphs of a folder, which are run here."""
    if generates:
        return _run_graph(path)
    if path.suffix == ".npz":
        arrays = read_arrays(path)
        if not arrays:
            text = f"--expect {path}: the file has no arrays to compare with; give outputs by their names"
            raise InputError(text, code=ErrorCode.INVALID_VALUE, path=path, field="expect")
        return lambda number, feeds: {name: _rows(path, array, number, feeds) for name, array in arrays.items()}
    graph = path / "model.onnx" if path.is_dir() else path
    if not graph.is_file():
        text = (
            f"--expect {path}: no such file; give baseline, any, an .npz of outputs, an ONNX file or an output folder"
        )
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=graph, field="expect")
    return _run_graph(graph)


def _rows(path: Path, array: np.ndarray, number: int, feeds: Feeds) -> np.ndarray:
    batch = len(next(iter(feeds.values())))
    if not array.ndim:
        text = f"--expect {path}: an array is a single number; give a row of outputs for every row of inputs"
        raise InputError(text, code=ErrorCode.INVALID_VALUE, path=path, field="expect")
    if len(array) < (number + 1) * batch:
        text = f"--expect {path}: {len(array)} rows of outputs, fewer than the inputs; give an output for every row"
        raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, path=path, count=len(array), needed=(number + 1) * batch)
    return array[number * batch : (number + 1) * batch]


def _run_graph(path: Path) -> _Source:
    """Outputs of a graph, or of the graphs of a folder that generates, without optimization on the CPU."""
    if path.is_dir():
        from compressor.generation.steps import run_in_steps
        from compressor.generation.weights import reference_sessions

        sessions = reference_sessions(path)
        return lambda number, feeds: run_in_steps(sessions, feeds)
    if not path.is_file():
        text = "the folder of the engine lacks its graph; name a graph with --expect, or give baseline or any"
        raise InputError.of_file(path, text, ErrorCode.FILE_MISSING, field="expect")
    with library_errors(path):
        run = unoptimized_runner(path)
        inputs = specs_of(load(path).graph.inputs, path)
    return lambda number, feeds: run(cast_inputs(feeds, inputs))
