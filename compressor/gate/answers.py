"""Does a model answer right? Asked before anything is timed: an empty answer is always fast."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import InputError, MismatchError
from compressor.gate.drivers import Driver, fitted
from compressor.gate.local import Local
from compressor.gate.verdict import Answers
from compressor.targets.base import TOLERANCE, Feeds
from compressor.targets.compare import relative_error
from compressor.targets.session import describe, open_session, run
from compressor.targets.tensors import inputs_of
from graph_passes import load

ANY, BASELINE = "any", "baseline"
Outputs = dict[str, np.ndarray]


def require(
    driver: Driver,
    feeds: Sequence[Feeds],
    prepared: Sequence[Any],
    baseline: Sequence[Outputs],
    expect: str | None,
    tolerance: float | None,
) -> tuple[list[Outputs], Answers]:
    """A model's outputs for every batch, which are as they should be.

    Args:
        driver: the model.
        feeds: every batch.
        prepared: the same, as the driver takes them.
        baseline: the baseline's outputs for every batch.
        expect: whose answers it has to give. `baseline`; `any`: the shapes and types of the baseline's, and numbers
            that are finite; a `.npz` of outputs by name `[row, ...]`; an ONNX file, or a folder with `model.onnx`, that
            is run here. None: of a graph on this machine, the graph's own, run without any optimization; of a
            server's model, the baseline's.
        tolerance: largest relative error; None: that of the driver's precision, and none of whole numbers.

    Raises:
        MismatchError: it answers wrong, or nothing.
    """
    own = expect is None and isinstance(driver, Local)
    found = [driver.answers(batch) for batch in prepared]
    if expect == ANY:
        for number, (got, model) in enumerate(zip(found, baseline, strict=True)):
            sensible(driver.name, number, got)
            _alike(driver.name, number, got, model)
        return found, Answers(expected="any", error=None, tolerance=0.0, batches=len(found))
    limit = tolerance if tolerance is not None else TOLERANCE[driver.precision]
    if own:
        assert isinstance(driver, Local)
        whose, right = "its own graph, run plainly", _graph(driver.graph)
    elif expect in (None, BASELINE):
        whose, right = "the baseline", lambda number, _: baseline[number]
    else:
        assert expect is not None
        whose, right = expect, _expected(Path(expect))
    error = 0.0
    for number, got in enumerate(found):
        sensible(driver.name, number, got)
        wanted = right(number, feeds[number])
        missing = wanted.keys() - got.keys()
        if missing:
            raise MismatchError(
                f"{driver.name}: it has no output {', '.join(sorted(missing))}, which {whose} has; it gives"
                f" {', '.join(sorted(got))}"
            )
        for name, array in wanted.items():
            apart = relative_error(array, got[name], feeds[number])
            if apart and tolerance is None and array.dtype.kind in "biu":
                raise MismatchError(
                    f"{driver.name}: output {name} is not that of {whose} (batch {number}), and whole numbers have to"
                    " be equal; it was not timed; --tolerance allows a relative error"
                )
            error = max(error, apart)
    if error > limit:
        hint = "" if own else "; if it computes another function by design, --expect OUT or --expect any"
        raise MismatchError(
            f"{driver.name}: its answers are not those of {whose}: relative error {error:.2g}, {limit:g} is allowed; it"
            f" was not timed{hint}"
        )
    return found, Answers(expected=whose, error=error, tolerance=limit, batches=len(found))


def unchanged(
    driver: Driver,
    feeds: Sequence[Feeds],
    prepared: Sequence[Any],
    before: Sequence[Outputs],
    found: Answers,
) -> None:
    """Raise MismatchError where a model that was timed, and answered right before, answers otherwise now."""
    for number, batch in enumerate(prepared):
        now = driver.answers(batch)
        sensible(driver.name, number, now)
        if found.error is None:
            continue
        for name, array in before[number].items():
            apart = relative_error(array, now[name], feeds[number]) if name in now else float("inf")
            if apart > found.tolerance:
                raise MismatchError(
                    f"{driver.name}: output {name} has changed while it was timed (batch {number}, relative error"
                    f" {apart:.2g}); its times count for nothing"
                )


def sensible(name: str, number: int, outputs: Outputs) -> None:
    """Raise MismatchError unless there are outputs, none of them empty, and every number is finite."""
    for output, array in outputs.items():
        if array.size == 0:
            raise MismatchError(f"{name}: output {output} is empty (batch {number}); it was not timed")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise MismatchError(f"{name}: output {output} holds NaN or infinity (batch {number}); it was not timed")
    if not outputs:
        raise MismatchError(f"{name}: it gives no outputs (batch {number}); it was not timed")


def _alike(name: str, number: int, outputs: Outputs, model: Outputs) -> None:
    for output, array in model.items():
        got = outputs.get(output)
        if got is None or got.shape != array.shape or got.dtype != array.dtype:
            said = "missing" if got is None else f"{got.dtype} {list(got.shape)}"
            raise MismatchError(
                f"{name}: output {output} is {said}, the baseline's is {array.dtype} {list(array.shape)} (batch"
                f" {number}); it was not timed"
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
    return lambda number, feeds: run(session, fitted(feeds, inputs))
