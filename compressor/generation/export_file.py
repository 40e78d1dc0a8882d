"""Write the graph with caches of a file with its gates, and prove it against the file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import graph_passes
from compressor.engines.prove import Case, prove_outputs, require
from compressor.errors import ErrorCode, InputError
from compressor.generation.prove import generation_cases
from compressor.generation.steps import LOGITS, run_in_steps
from compressor.model_folder import ModelFolder
from compressor.results import Proof, ProofStage, VariantName
from compressor.targets.base import TOLERANCE
from compressor.targets.caches import DECODER
from compressor.targets.onnxruntime.sessions import OrtSessions
from compressor.units.prunable import Attention
from graph_passes import Plan


def texts_of(folder: ModelFolder, cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases of a run as texts to continue, without padding where the graph reads none on the left.

    Raises:
        InputError: the graph reads more than a text and its mask.
    """
    return generation_cases(cases, pads_left=folder.model.pads_left, left_out=("decoder_attention_mask",))


def export_graphs(folder: ModelFolder, plan: Plan, out: Path, *, opset: int, attention: Attention) -> tuple[str, ...]:
    """Write the graph of the file with gates, in its form; see `export_module`."""
    folder.model.write_cached(plan, out / DECODER)
    return (DECODER,)


def rewrite_graphs(folder: ModelFolder, plan: Plan, whole: Path, files: Iterable[str], out: Path) -> None:
    """Write the graph of the file with the gates of a plan; see `export_module`."""
    folder.model.write_cached(plan, out / DECODER)


def prove_export(
    folder: ModelFolder, plan: Plan, texts: Sequence[Case], graphs: Path, attention: Attention, variant: VariantName
) -> Proof:
    """The proof that the graph with gates, in steps, computes what the file computes at once and in steps.

    The reference is the file in ONNX Runtime, with the gates folded into its weights.

    Raises:
        InputError: the file does not run on a text, or computes something else in steps than at once.
        MismatchError: the graph computes something else than the file.
    """
    file, stage, tolerance = folder.model, ProofStage.CACHED_EXPORT, TOLERANCE[folder.access.precision]
    with tempfile.TemporaryDirectory() as scratch, file.reference(plan) as run:
        expected = [{LOGITS: run(text.feeds)[LOGITS]} for text in texts]
        graph_passes.save(file.with_weights(plan, with_caches=True), Path(scratch) / DECODER)
        in_steps = partial(run_in_steps, OrtSessions(Path(scratch), optimized=False))
        itself = prove_outputs(stage, variant, texts, expected, in_steps, tolerance)
    if not itself.holds:
        problem = (
            f"{file.file}: its outputs in steps, with caches, differ from its outputs for a whole text at once"
            f" (relative error {itself.error:.3g}, on {'; '.join(itself.cases)}); export it again, or deliver a graph"
            " without caches (--no-cache)"
        )
        raise InputError(problem, code=ErrorCode.UNSUPPORTED_MODEL, path=file.file, error=itself.error)
    gated = OrtSessions(graphs, optimized=False)
    return require(prove_outputs(stage, variant, texts, expected, partial(run_in_steps, gated), tolerance))
