"""Export, shrink, prove and time the graphs with caches of a compressed model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import graph_passes
from compressor.engines.build import require_complete
from compressor.engines.prove import Case
from compressor.engines.prove_export import require_export
from compressor.errors import ErrorCode, InputError
from compressor.export import rewrite_reference
from compressor.generation import engine_of
from compressor.generation.bench import prompt_call, token_call
from compressor.generation.export import export_generation
from compressor.generation.prove import generation_cases, prove_steps, whole_outputs
from compressor.generation.sessions import OrtSessions
from compressor.generation.steps import MASK, run_in_steps
from compressor.measure.timing import alternate_calls, speed_of
from compressor.model_folder import ModelFolder, example_inputs, fresh_model
from compressor.progress import RunLog
from compressor.results import Generation, GenerationSpeed, Proof, ProofStage, VariantName, size_label
from compressor.targets import BuildOptions, span
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime.engine import build_engine
from compressor.targets.relative_error import Outputs
from compressor.units.hook import Attention
from graph_passes import Plan
from graph_passes.attention.gate_initializers import find_gates
from graph_passes.shrink import shrink_parts

_CHOICE_SECONDS = 1.0
"""Maximum time spent on choosing the form of an operator."""


@dataclass(frozen=True)
class CachedGraphs:
    """The graphs of the whole model with caches, with a gate for every unit.

    Attributes:
        files: their names, in the order in which they run; the last is the decoder.
        folder: their folder.
        plan: the plan that keeps every unit.
        attention: the form of attention in them.
        proof: model = graphs with gates.
    """

    files: tuple[str, ...]
    folder: Path
    plan: Plan
    attention: Attention
    proof: Proof


def export_whole(
    folder: ModelFolder, plan: Plan, cases: Sequence[Case], out: Path, *, opset: int, attention: Attention
) -> CachedGraphs:
    """Export the whole model with caches, and prove that its graphs compute it.

    Args:
        folder: the model.
        plan: the plan that keeps every unit.
        cases: inputs of the proofs.
        out: folder of the graphs, which exists.
        opset: version of the ONNX operator set.
        attention: the form of attention in the graphs.

    Raises:
        InputError: the model cannot be exported with caches.
        MismatchError: the proof does not hold.
    """
    texts = generation_cases(cases)
    files = export_generation(folder.model, plan, out, opset=opset, attention=attention)
    proof = _prove_export(folder, plan, texts, out, attention, "dense")
    return CachedGraphs(files, out, plan, attention, proof)


def shrink_graphs(
    whole: CachedGraphs, folder: ModelFolder, plan: Plan, cases: Sequence[Case], scratch: Path, out: Path
) -> tuple[Proof, ...]:
    """Write the graphs of a plan without what it drops, each proven.

    Args:
        whole: the graphs of the whole model.
        folder: the model, which has the weights of the plan.
        plan: the plan.
        cases: inputs of the proofs.
        scratch: folder for the graphs with the gates and weights of the plan, which exists.
        out: folder of the result.

    Returns:
        The proofs.

    Raises:
        PlanError, SiteRefusedError: the graphs cannot lose what the plan drops.
        MismatchError: a proof does not hold.
    """
    files, texts = whole.files, generation_cases(cases)
    for name in files:
        part = plan.part(find_gates(graph_passes.load(whole.folder / name).graph))
        if not rewrite_reference(whole.folder / name, folder.model, part, scratch / name):
            raise InputError(
                f"{name}: the graph has no gate for a group of the plan, or the plan has masks",
                code=ErrorCode.PLAN_MISMATCH,
                file=name,
            )
    exported = _prove_export(folder, plan, texts, scratch, whole.attention, "compressed")
    _shrink(files, plan, scratch, out)
    expected, shrunk = _outputs(scratch, texts), OrtSessions(out, optimized=False)
    return exported, prove_steps(ProofStage.CACHED_SHRINK, "compressed", texts, expected, shrunk)


def _prove_export(
    folder: ModelFolder,
    plan: Plan,
    texts: Sequence[Case],
    graphs: Path,
    attention: Attention,
    variant: VariantName,
) -> Proof:
    """The proof that graphs with gates, in steps, compute what the gated model computes on whole texts.

    The reference is the folder, loaded afresh: with the weights of its model where these may have been trained.
    """
    fresh, gated = fresh_model(folder, trained=variant != "dense"), OrtSessions(graphs, optimized=False)

    def prove() -> Proof:
        expected = whole_outputs(fresh, plan, texts, attention)
        return prove_steps(ProofStage.CACHED_EXPORT, variant, texts, expected, gated)

    return require_export(prove, fresh, texts)


def _shrink(files: Iterable[str], plan: Plan, source: Path, out: Path) -> None:
    """Write graphs with gates without what a plan drops.

    Raises:
        SiteRefusedError: a graph keeps units that the plan drops.
    """
    parts = shrink_parts({name: graph_passes.load(source / name) for name in files}, plan)
    for name, part in parts.items():
        if require_complete(part).model.graph.outputs:  # nothing reads an encoder where no cross-attention has heads
            graph_passes.save(part.model, out / name)


def _outputs(folder: Path, texts: Sequence[Case]) -> list[Outputs]:
    """Logits of the graphs of a folder, which the runtime does not optimize, on each text in steps."""
    sessions = OrtSessions(folder, optimized=False)
    return [run_in_steps(sessions, text.feeds) for text in texts]


def build_engines(files: Iterable[str], folder: Path, sizes: Iterable[tuple[int, int]], threads: int | None) -> None:
    """Build the engines of graphs for ONNX Runtime beside them: attention over caches is one operator where it pays.

    Args:
        files: names of the graphs.
        folder: their folder.
        sizes: batch sizes and lengths of texts, at which forms of operators are compared.
        threads: threads of the engines; None: one per core.

    Raises:
        InputError: ONNX Runtime cannot run a graph.
    """
    batches, lengths = zip(*sizes, strict=True)
    options = BuildOptions(batch=span(batches), seq=span(lengths), norm_seconds=_CHOICE_SECONDS)
    for path in (folder / name for name in files):
        if path.is_file():
            build_engine(path, engine_of(path), provider="cpu", threads=threads, options=options)


def prove_engines(folder: Path, cases: Sequence[Case], threads: int | None) -> Proof:
    """The proof that the engines compute what their graphs do, which the runtime does not optimize there.

    Args:
        folder: the folder of the graphs and engines.
        cases: inputs of the proofs of the run.
        threads: threads of the sessions; None: one per core.

    Raises:
        MismatchError: it does not hold.
    """
    texts, engines = generation_cases(cases), OrtSessions(folder, provider="cpu", threads=threads)
    return prove_steps(ProofStage.CACHED_BUILD, "compressed", texts, _outputs(folder, texts), engines)


def time_graphs(
    whole: CachedGraphs,
    folder: ModelFolder,
    compressed: Path,
    sizes: Sequence[tuple[int, int]],
    threads: int | None,
    *,
    seconds: float,
    seed: int,
    log: RunLog,
) -> Generation:
    """Time the graphs with every unit and those of the plan, in turn, and count the bytes of their caches.

    Args:
        whole: the graphs of the whole model.
        folder: the model.
        compressed: folder of the graphs without what the plan drops.
        sizes: batch sizes and lengths of the texts before the token.
        threads: threads of the sessions; None: one per core.
        seconds: approximate duration of each measurement.
        seed: seed of the bootstrap and the texts.
        log: receives the stages.
    """
    files, dense = whole.files, whole.folder / "dense"
    if not dense.exists():
        dense.mkdir()
        _shrink(files, whole.plan, whole.folder, dense)
        build_engines(files, dense, sizes, threads)
    both = [OrtSessions(path, provider="cpu", threads=threads) for path in (dense, compressed)]
    speeds = []
    for batch, length in sizes:
        feeds = texts_to_time(folder, batch, length, seed)
        for phase, calls in (("prompt", prompt_call), ("token", token_call)):
            with log.stage(f"timing dense and compressed, {phase}, {size_label(batch, length)}") as on_progress:
                first, second = (calls(sessions, feeds, length) for sessions in both)
                pairs = alternate_calls(first, second, seconds, on_progress=on_progress)
                speed = speed_of(pairs, batch=batch, seq=length, seed=seed)
            speeds.append(GenerationSpeed(phase=phase, speed=speed))
    before, after = (sessions.bytes_per_token for sessions in both)
    files = tuple(name for name in files if (compressed / name).is_file())
    precision = both[1].precision
    return Generation(
        files=files, precision=precision, speeds=tuple(speeds), dense_cache=before, compressed_cache=after
    )


def texts_to_time(folder: ModelFolder, batch: int, length: int, seed: int) -> Feeds:
    """Texts of the model, one token longer than `length`, without padding."""
    inputs = example_inputs(folder, batch, length + 1, seed)
    feeds = {name: np.asarray(tensor) for name, tensor in inputs.items() if name != "decoder_attention_mask"}
    return feeds | {name: np.ones_like(feeds[name]) for name in feeds if name == MASK}
