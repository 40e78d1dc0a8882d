"""Proofs of the graphs in an output folder at fixed shapes, in every runtime that is installed and may read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from compressor.errors import CompressorError, TargetMissingError, UsageError
from compressor.results import Note, NoteCode, Proof
from compressor.run import verify
from compressor.run.products import Case
from compressor.run.run_log import RunLog
from compressor.targets import TARGETS, TOLERANCE, Precision, Target, target
from compressor.targets.relative_error import Outputs
from compressor.workdir import QUANTIZED_GRAPHS


def prove_graphs(
    folder: Path, cases: Sequence[Case], log: RunLog, graphs: Mapping[str, Path] | None = None
) -> tuple[Proof, ...]:
    """Prove the graphs of a folder in each installed runtime that may read them, compiled for a batch of one row.

    A graph is also read by others than `compress`: without its rewrites, and often at one shape, for which a runtime
    may choose other kernels. A runtime in which a graph does not hold gets a note, since the engine that is delivered
    has proofs of its own.

    Args:
        folder: the folder.
        cases: inputs of the proofs; those of one row are compared.
        log: receives the stages and the notes.
        graphs: name in the folder -> file, of float graphs that are not there yet; None: there are none.

    Returns:
        The proofs that hold.
    """
    fixed = [case for case in cases if _is_one_row(case)]
    if not fixed:
        return ()
    others = [case for case in cases if not _is_one_row(case)]
    files = {name: folder / name for name in ("model.onnx", *QUANTIZED_GRAPHS) if (folder / name).is_file()}
    proofs = []
    for name, path in {**files, **(graphs or {})}.items():
        expected: list[Outputs] = []  # the same for every runtime
        for runtime, precision in _readers(name):
            with log.stage(f"{name}: proving it at fixed shapes in {runtime.title}"):
                try:
                    expected = expected or verify.graph_outputs(path, (*fixed, *others))
                    proof = _prove(path, name, runtime, precision, fixed, others, expected)
                    reason = "" if proof.holds else f"its outputs differ by {proof.error:.2g} of their size"
                except CompressorError as error:
                    proof, reason = None, str(error)
            if proof is not None and proof.holds:
                proofs.append(proof)
                continue
            text = (
                f"{name}: do not run it in {runtime.title} at a fixed shape ({reason}); {_remedy(runtime, precision)}"
            )
            log.add_notes([Note(code=NoteCode.GRAPH_WRONG_IN_RUNTIME, text=text)])
    return tuple(proofs)


def _is_one_row(case: Case) -> bool:
    """Whether a case has one row, and no memory of length 0, which is no shape to compile for."""
    arrays = case.feeds.values()
    return next(iter(arrays)).shape[0] == 1 and all(array.size for array in arrays)


def _readers(name: str) -> Iterator[tuple[Target, Precision]]:
    """The installed runtimes that may read a graph of the folder, with the precision that it then has."""
    for runtime in map(target, TARGETS):
        for precision in runtime.tried_precisions:
            is_source = runtime.quantized_graph(precision) == name
            if is_source or (name not in QUANTIZED_GRAPHS and precision == "fp32"):
                try:
                    runtime.check(precision=precision)
                except (TargetMissingError, UsageError):
                    continue
                yield runtime, precision


def _prove(
    path: Path,
    name: str,
    runtime: Target,
    precision: Precision,
    fixed: Sequence[Case],
    others: Sequence[Case],
    expected: Sequence[Outputs],
) -> Proof:
    named = [replace(case, name=f"{name} in {runtime.title}, {case.name}") for case in fixed]
    return verify.prove_fixed(
        lambda feeds: runtime.run_fixed(path, feeds, precision=precision),
        named,
        others,
        expected,
        "dense" if name == "dense.onnx" else "compressed",
        TOLERANCE[precision],
    )


def _remedy(runtime: Target, precision: Precision) -> str:
    # The precision is named for floats too: without it, the engine has the precision of the run.
    return f"compress build OUT --target {runtime.name} --precision {precision} makes an engine from it that is proven"
