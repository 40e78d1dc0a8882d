"""Export, shrink, prove and time the graphs with caches of a compressed model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import graph_passes
from compressor.engines.prove import Case, unoptimized
from compressor.engines.prove_export import require_export
from compressor.errors import ErrorCode, InputError
from compressor.export import rewrite_reference
from compressor.generation.export import export_generation
from compressor.generation.prove import generation_cases, outputs_in_steps, prove_steps, whole_outputs
from compressor.generation.steps import MASK, Steps
from compressor.measure.timing import alternate_calls, speed_of
from compressor.model_folder import ModelFolder, example_inputs
from compressor.progress import RunLog
from compressor.results import Generation, GenerationSpeed, Proof, ProofStage, VariantName, size_label
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime.ort_session import runner
from compressor.units.hook import Attention
from graph_passes import Plan
from graph_passes.attention.gate_initializers import find_gates
from graph_passes.shrink import shrink_parts


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
    proof = _prove_export(folder, plan, texts, out, files, attention, "dense")
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
        PlanError: the graphs cannot lose what the plan drops.
        MismatchError: a proof does not hold.
    """
    files, texts, decoder = whole.files, generation_cases(cases), whole.files[-1]
    for name in files:
        part = plan.part(find_gates(graph_passes.load(whole.folder / name).graph))
        if not rewrite_reference(whole.folder / name, folder.model, part, scratch / name):
            raise InputError(
                f"{name}: the graph has no gate for a group of the plan, or masks; use --no-cache",
                code=ErrorCode.PLAN_MISMATCH,
                file=name,
            )
    exported = _prove_export(folder, plan, texts, scratch, files, whole.attention, "compressed")
    _shrink(files, plan, scratch, out)
    expected = outputs_in_steps({name: unoptimized(scratch / name) for name in files}, scratch / decoder, texts)
    shrunk = {name: unoptimized(out / name) for name in files}
    return exported, prove_steps(ProofStage.CACHED_SHRINK, "compressed", texts, expected, shrunk, out / decoder)


def _prove_export(
    folder: ModelFolder,
    plan: Plan,
    texts: Sequence[Case],
    graphs: Path,
    files: Sequence[str],
    attention: Attention,
    variant: VariantName,
) -> Proof:
    """The proof that graphs with gates, in steps, compute what the gated model computes on whole texts."""
    gated = {name: unoptimized(graphs / name) for name in files}

    def prove() -> Proof:
        expected = whole_outputs(folder.model, plan, texts, attention)
        return prove_steps(ProofStage.CACHED_EXPORT, variant, texts, expected, gated, graphs / files[-1])

    return require_export(prove, folder.model, texts)


def _shrink(files: Iterable[str], plan: Plan, source: Path, out: Path) -> None:
    """Write graphs with gates without what a plan drops."""
    parts = shrink_parts({name: graph_passes.load(source / name) for name in files}, plan)
    for name, part in parts.items():
        graph_passes.save(part.model, out / name)


def prove_engines(files: Sequence[str], folder: Path, cases: Sequence[Case], settings: Mapping[str, Any]) -> Proof:
    """The proof that the sessions that generate compute what the graphs do, which the runtime does not optimize there.

    Args:
        files: names of the graphs in their order.
        folder: their folder.
        cases: inputs of the proofs of the run.
        settings: settings of the sessions.

    Raises:
        MismatchError: it does not hold.
    """
    texts, decoder = generation_cases(cases), folder / files[-1]
    expected = outputs_in_steps({name: unoptimized(folder / name) for name in files}, decoder, texts)
    engines = {name: runner(folder / name, settings) for name in files}
    return prove_steps(ProofStage.CACHED_BUILD, "compressed", texts, expected, engines, decoder)


def time_graphs(
    whole: CachedGraphs,
    folder: ModelFolder,
    compressed: Path,
    sizes: Iterable[tuple[int, int]],
    settings: Mapping[str, Any],
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
        settings: settings of the sessions.
        seconds: approximate duration of each measurement.
        seed: seed of the bootstrap and the texts.
        log: receives the stages.
    """
    files, dense = whole.files, whole.folder / "dense"
    if not dense.exists():
        dense.mkdir()
        _shrink(files, whole.plan, whole.folder, dense)
    both = [
        Steps.of({name: runner(path / name, settings) for name in files}, path / files[-1])
        for path in (dense, compressed)
    ]
    speeds = []
    for batch, length in sizes:
        feeds = _texts(folder, batch, length, seed)
        for phase, calls in (("prompt", _prompt_calls), ("token", _token_calls)):
            with log.stage(f"timing dense and compressed, {phase}, {size_label(batch, length)}") as on_progress:
                first, second = (calls(steps, feeds, length) for steps in both)
                pairs = alternate_calls(first, second, seconds, on_progress=on_progress)
                speed = speed_of(pairs, batch=batch, seq=length, seed=seed)
            speeds.append(GenerationSpeed(phase=phase, speed=speed))
    before, after = (steps.bytes_per_token for steps in both)
    return Generation(files=tuple(files), speeds=tuple(speeds), dense_cache=before, compressed_cache=after)


def _texts(folder: ModelFolder, batch: int, length: int, seed: int) -> Feeds:
    """Texts of the model, one token longer than `length`, without padding."""
    inputs = example_inputs(folder, batch, length + 1, seed)
    feeds = {name: np.asarray(tensor) for name, tensor in inputs.items() if name != "decoder_attention_mask"}
    return feeds | {name: np.ones_like(feeds[name]) for name in feeds if name == MASK}


def _prompt_calls(steps: Steps, feeds: Feeds, length: int) -> Callable[[], object]:
    """A function that reads the texts from the beginning."""
    return lambda: steps.step(feeds, 0, length, steps.begin(feeds))


def _token_calls(steps: Steps, feeds: Feeds, length: int) -> Callable[[], object]:
    """A function that computes the token after the texts."""
    _, caches = steps.step(feeds, 0, length, steps.begin(feeds))
    return lambda: steps.step(feeds, length, length + 1, caches)
