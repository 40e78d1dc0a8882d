"""Does a model answer right? Asked before anything is timed, and after: an empty answer is always fast."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from compressor.errors import InputError, MismatchError
from compressor.latency.endpoints import Endpoint, cast_inputs
from compressor.latency.local_engine import LocalEngine
from compressor.latency.verdict import Answers
from compressor.targets.base import TOLERANCE, Feeds
from compressor.targets.onnxruntime.ort_session import describe, open_session, run
from compressor.targets.relative_error import relative_error
from compressor.targets.tensor_specs import inputs_of
from graph_passes import load

ANY, BASELINE = "any", "baseline"
Outputs = dict[str, np.ndarray]


def judge(
    driver: Endpoint,
    feeds: Sequence[Feeds],
    baseline: Sequence[Outputs],
    expect: str | None,
    tolerance: float | None,
) -> Callable[[Sequence[Outputs]], Answers]:
    """What tells whether a model's outputs for every batch are as they should be: it raises MismatchError where they
    are not, and says how far they are off where they are.

    Args:
        driver: the model.
        feeds: every batch.
        baseline: the baseline's outputs for every batch.
        expect: whose answers it has to give. `baseline`; `any`: the shapes and types of the baseline's, and numbers
            that are finite; a `.npz` of outputs by name `[row, ...]`; an ONNX file, or a folder with `model.onnx`, that
            is run here. None: of a graph on this machine, the graph's own, run without any optimization; of a
            server's model, the baseline's.
        tolerance: largest relative error; None: that of the driver's precision, and none of whole numbers.
    """
    own = expect is None and isinstance(driver, LocalEngine)
    limit = tolerance if tolerance is not None else TOLERANCE[driver.precision]
    right: Callable[[int, Feeds], Outputs]
    if own:
        assert isinstance(driver, LocalEngine)
        whose, right = "its own graph, run plainly", _graph(driver.graph)
    elif expect in (None, BASELINE, ANY):
        whose, right = "the baseline", lambda number, _: baseline[number]
    else:
        assert expect is not None
        whose, right = expect, _expected(Path(expect))
    wanted = [right(number, batch) for number, batch in enumerate(feeds)]
    hint = "" if own else "; if it computes another function by design, --expect OUT or --expect any"

    def alike(found: Sequence[Outputs]) -> Answers:
        for number, got in enumerate(found):
            require_finite(driver.name, number, got)
            _alike(driver.name, number, got, wanted[number])
        return Answers(expected=ANY, error=None, tolerance=0.0, batches=len(found))

    def equal(found: Sequence[Outputs]) -> Answers:
        error = 0.0
        for number, got in enumerate(found):
            require_finite(driver.name, number, got)
            missing = wanted[number].keys() - got.keys()
            if missing:
                raise MismatchError(
                    f"{driver.name}: it has no output {', '.join(sorted(missing))}, which {whose} has; it gives"
                    f" {', '.join(sorted(got))}"
                )
            for name, array in wanted[number].items():
                apart = relative_error(array, got[name], feeds[number])
                whole = array.dtype.kind in "biu" and array.shape == got[name].shape
                if apart and whole and tolerance is None:
                    raise MismatchError(
                        f"{driver.name}: its answers are not those of {whose}: output {name} (batch {number}) differs,"
                        f" and whole numbers have to be equal (--tolerance allows a relative error){hint}"
                    )
                error = max(error, apart)
        if error > limit:
            raise MismatchError(
                f"{driver.name}: its answers are not those of {whose}: relative error {error:.2g}, {limit:g} is"
                f" allowed{hint}"
            )
        return Answers(expected=whose, error=error, tolerance=limit, batches=len(found))

    return alike if expect == ANY else equal


def require_finite(name: str, number: int, outputs: Outputs) -> None:
    """Raise MismatchError unless there are outputs, none of them empty, and every number is finite."""
    for output, array in outputs.items():
        if array.size == 0:
            raise MismatchError(f"{name}: output {output} is empty (batch {number})")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise MismatchError(f"{name}: output {output} holds NaN or infinity (batch {number})")
    if not outputs:
        raise MismatchError(f"{name}: it gives no outputs (batch {number})")


def _alike(name: str, number: int, outputs: Outputs, model: Outputs) -> None:
    for output, array in model.items():
        got = outputs.get(output)
        if got is None or got.shape != array.shape or got.dtype != array.dtype:
            said = "missing" if got is None else f"{got.dtype} {list(got.shape)}"
            raise MismatchError(
                f"{name}: output {output} is {said}, the baseline's is {array.dtype} {list(array.shape)} (batch"
                f" {number})"
            )


def _expected(path: Path) -> Callable[[int, Feeds], Outputs]:
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as archive:
                rows = dict(archive)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: no archive of outputs ({error}); write it by numpy.savez") from error
        return lambda number, feeds: {name: _rows(path, array, number, feeds) for name, array in rows.items()}
    graph = path / "model.onnx" if path.is_dir() else path
    if not graph.is_file():
        raise InputError(f"--expect {path}: give baseline, any, an .npz of outputs, an ONNX file or an output folder")
    return _graph(graph)


def _rows(path: Path, array: np.ndarray, number: int, feeds: Feeds) -> np.ndarray:
    batch = len(next(iter(feeds.values())))
    if len(array) < (number + 1) * batch:
        raise InputError(f"--expect {path}: {len(array)} rows of outputs, the inputs have more")
    return array[number * batch : (number + 1) * batch]


def _graph(path: Path) -> Callable[[int, Feeds], Outputs]:
    if not path.is_file():
        raise InputError(f"{path}: the graph of the engine is not beside it; --expect names one, or baseline, or any")
    session = open_session(path, {**describe("cpu", None), "graph_optimization": "none"})
    inputs = inputs_of(load(path), path)
    return lambda number, feeds: run(session, cast_inputs(feeds, inputs))
