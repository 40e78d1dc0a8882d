"""Build the engines with caches of a finished run again, for another target or machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import graph_passes
from compressor.engines.prove import Case
from compressor.generation.prove import generation_cases, prove_engines
from compressor.generation.weights import Rounding, build_rounded, move_engines
from compressor.results import Generation, Proof
from compressor.targets import WEIGHT_BITS, Target
from compressor.targets.base import TOLERANCE
from compressor.targets.caches import DECODER, ENCODER, PADDING
from compressor.targets.graph_facts import stored_precision


def rounding_of(generation: Generation) -> Rounding:
    """How a run has stored the weights of its decoder."""
    chosen = (
        Rounding(precision, row.in_float)
        for row in generation.candidates
        for precision in WEIGHT_BITS
        if row.chosen and row.precision == precision
    )
    return next(chosen, Rounding())


def build_again(
    out: Path,
    scratch: Path,
    runtime: Target,
    rounding: Rounding,
    cases: Sequence[Case],
    sizes: Iterable[tuple[int, int]],
    threads: int | None,
) -> tuple[Proof, ...]:
    """Build and prove the engines of the graphs of a folder.

    Args:
        out: the folder of the run, which stays as it is.
        scratch: an empty folder, which has copies of the graphs and their engines afterwards.
        rounding: how the weights of the decoder are stored.
        sizes: batch sizes and lengths of texts, at which forms of operators are compared.

    Raises:
        InputError: the runtime cannot read or run a graph.
        MismatchError: a proof does not hold.
    """
    graphs = [file for name in (ENCODER, DECODER) for file in out.glob(f"{name}*")]
    for file in graphs:
        shutil.copy(file, scratch)
    runtime.build_sessions(scratch, (ENCODER, DECODER), sizes, threads)
    decoder = graph_passes.load(scratch / DECODER)
    texts = generation_cases(cases, pads_left=PADDING not in decoder.metadata_props)
    tolerance = TOLERANCE[stored_precision(decoder)]
    proofs = [prove_engines(scratch, texts, runtime, threads, "compressed", tolerance)]
    if rounding.precision is not None:
        rounded = scratch / "rounded"
        rounded.mkdir()
        proofs.append(build_rounded(scratch, runtime, rounding, texts, threads, rounded)[1])
        move_engines(runtime, rounded, scratch)
        rounded.rmdir()
    return tuple(proofs)
