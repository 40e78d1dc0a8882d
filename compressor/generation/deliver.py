"""Export, shrink, prove and time the graphs with caches of a compressed model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import graph_passes
from compressor.engines.prove import Case, unoptimized
from compressor.engines.prove_export import require_export
from compressor.generation.export import export_generation
from compressor.generation.prove import generation_cases, outputs_in_steps, prove_steps, whole_outputs
from compressor.generation.steps import MASK, Steps
from compressor.measure.timing import alternate_calls, speed_of
from compressor.model_folder import ModelFolder, example_inputs
from compressor.progress import RunLog
from compressor.results import Generation, GenerationSpeed, Proof, ProofStage, size_label
from compressor.targets.base import Feeds
from compressor.targets.onnxruntime.ort_session import runner
from compressor.units.hook import Attention
from graph_passes import Plan
from graph_passes.shrink import shrink_parts


def write_graphs(
    folder: ModelFolder,
    plan: Plan,
    cases: Sequence[Case],
    scratch: Path,
    out: Path,
    *,
    opset: int,
    attention: Attention,
) -> tuple[tuple[str, ...], tuple[Proof, ...]]:
    """Write the graphs of a plan without what it drops, each proven.

    Args:
        folder: the model, which has the weights of the plan.
        plan: the plan.
        cases: inputs of the proofs.
        scratch: folder for the graphs with gates, which stay there.
        out: folder of the result.
        opset: version of the ONNX operator set.
        attention: the form of attention in the graphs.

    Returns:
        The names of the files in the order in which they run, and the proofs.

    Raises:
        InputError: the model cannot be exported with caches.
        PlanError: the graphs cannot lose what the plan drops.
        MismatchError: a proof does not hold.
    """
    files = export_generation(folder.model, plan, scratch, opset=opset, attention=attention)
    texts = generation_cases(cases)
    gated, decoder = {name: unoptimized(scratch / name) for name in files}, files[-1]

    def prove_export() -> Proof:
        expected = whole_outputs(folder.model, plan, texts, attention)
        return prove_steps(ProofStage.EXPORT, "compressed", texts, expected, gated, scratch / decoder)

    exported = require_export(prove_export, folder.model, texts)
    _shrink(files, plan, scratch, out)
    expected = outputs_in_steps(gated, scratch / decoder, texts)
    shrunk = {name: unoptimized(out / name) for name in files}
    proof = prove_steps(ProofStage.SHRINK, "compressed", texts, expected, shrunk, out / decoder)
    return files, (exported, proof)


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
    return prove_steps(ProofStage.BUILD, "compressed", texts, expected, engines, decoder)


def time_graphs(
    folder: ModelFolder,
    files: Sequence[str],
    gated: Path,
    compressed: Path,
    plan: Plan,
    sizes: Iterable[tuple[int, int]],
    settings: Mapping[str, Any],
    *,
    seconds: float,
    seed: int,
    log: RunLog,
) -> Generation:
    """Time the graphs with every unit and those of the plan, in turn, and count the bytes of their caches.

    Args:
        folder: the model.
        files: names of the graphs in their order.
        gated: folder of the graphs with gates, from which those with every unit are made.
        compressed: folder of the graphs without what the plan drops.
        plan: the plan.
        sizes: batch sizes and lengths of the texts before the token.
        settings: settings of the sessions.
        seconds: approximate duration of each measurement.
        seed: seed of the bootstrap and the texts.
        log: receives the stages.
    """
    dense = gated / "dense"
    dense.mkdir(exist_ok=True)
    every = plan.replace_groups(replace(group, kept=tuple(range(group.units)), scale=()) for group in plan.groups)
    _shrink(files, every, gated, dense)
    both = [
        Steps.of({name: runner(path / name, settings) for name in files}, path / files[-1])
        for path in (dense, compressed)
    ]
    speeds = []
    for batch, length in sizes:
        feeds = _texts(folder, batch, length, seed)
        for phase, calls in (("prompt", _prompt_calls), ("token", _token_calls)):
            with log.stage(f"timing dense and compressed, {phase}, {size_label(batch, length)}") as on_progress:
                pairs = alternate_calls(
                    *(calls(steps, feeds, length) for steps in both), seconds, on_progress=on_progress
                )
                speed = speed_of(pairs, batch=batch, seq=length, seed=seed)
            speeds.append(GenerationSpeed(phase=phase, speed=speed))
    first, second = (steps.bytes_per_token for steps in both)
    return Generation(files=tuple(files), speeds=tuple(speeds), dense_cache=first, compressed_cache=second)


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
