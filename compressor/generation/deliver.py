"""Export, shrink, prove and time the graphs with caches of a compressed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import graph_passes
from compressor.engines.build import require_complete
from compressor.engines.prove import Case
from compressor.generation.prove import graph_outputs, prove_steps
from compressor.generation.weights import round_engine
from compressor.generation.workload import CachedEngine, Workload
from compressor.measure.timing import alternate_calls, speed_of
from compressor.model_folder import ModelFolder
from compressor.progress import RunLog
from compressor.results import Generation, GenerationSpeed, Proof, ProofStage, Size, size_label
from compressor.targets import Target
from compressor.targets.base import TOLERANCE, Precision, WeightPrecision
from compressor.targets.caches import DECODER, PLAN, plan_digest
from compressor.targets.onnxruntime.sessions import OrtSessions
from compressor.units.prunable import Attention
from graph_passes import Plan
from graph_passes.attention.gate_initializers import set_gates
from graph_passes.flow.caches import bytes_per_token
from graph_passes.shrink import shrink_parts


@dataclass(frozen=True)
class CachedGraphs:
    """The graphs of the whole model with caches, with a gate for every unit.

    Attributes:
        files: file names of the graphs, in the order in which they run; the last is the decoder.
        folder: the folder of the graphs.
        plan: the plan that keeps every unit.
        attention: the form of attention in the graphs.
        proof: model = graphs with gates.
        texts: inputs of the proofs.
        precision: the precision of the graphs' weights.
    """

    files: tuple[str, ...]
    folder: Path
    plan: Plan
    attention: Attention
    proof: Proof
    texts: tuple[Case, ...] = ()
    precision: Precision = "fp32"

    @property
    def tolerance(self) -> float:
        """Largest relative error between these graphs and the graphs and engines that are made from them."""
        return TOLERANCE[self.precision]


def _exporter_of(folder: ModelFolder) -> Any:
    """The module whose functions write and prove graphs with caches; see `generation.export_module`."""
    return import_module(folder.access.cached_exporter)


def export_whole(
    folder: ModelFolder, plan: Plan, cases: Sequence[Case], out: Path, *, opset: int, attention: Attention
) -> CachedGraphs:
    """Export the whole model with caches, and prove that its graphs compute it.

    Args:
        plan: the plan that keeps every unit.
        out: folder of the graphs, which exists.
        opset: version of the ONNX operator set.

    Raises:
        InputError: the model cannot be exported with caches.
        MismatchError: the proof does not hold.
    """
    exporter = _exporter_of(folder)
    texts = exporter.texts_of(folder, cases)
    files = exporter.export_graphs(folder, plan, out, opset=opset, attention=attention)
    proof = exporter.prove_export(folder, plan, texts, out, attention, "dense")
    return CachedGraphs(files, out, plan, attention, proof, texts, folder.access.precision)


def shrink_graphs(
    whole: CachedGraphs, folder: ModelFolder, plan: Plan, runtime: Target, scratch: Path, out: Path
) -> tuple[Proof, ...]:
    """Write the graphs without the units that a plan drops, and prove each.

    Args:
        folder: the model, which has the weights of the plan.
        scratch: folder for the graphs with the gates and weights of the plan, which exists.
        out: folder of the result.

    Raises:
        PlanError, SiteRefusedError: the graphs cannot lose what the plan drops.
        MismatchError: a proof does not hold.
    """
    exporter, texts = _exporter_of(folder), whole.texts
    exporter.rewrite_graphs(folder, plan, whole.folder, whole.files, scratch)
    exported = exporter.prove_export(folder, plan, texts, scratch, whole.attention, "compressed")
    graphs = _shrink({name: graph_passes.load(scratch / name) for name in whole.files}, plan)
    for graph in graphs.values():
        runtime.prepare_caches(graph)
    _write(graphs, out)
    expected, shrunk = graph_outputs(scratch, texts), OrtSessions(out, optimized=False)
    return exported, prove_steps(ProofStage.CACHED_SHRINK, "compressed", texts, expected, shrunk, whole.tolerance)


def shrink_whole(whole: CachedGraphs, plan: Plan) -> dict[str, ir.Model]:
    """The graphs of a plan with the weights of the whole model.

    Raises:
        SiteRefusedError: a graph keeps units that the plan drops.
    """
    graphs = {name: graph_passes.load(whole.folder / name) for name in whole.files}
    for graph in graphs.values():
        set_gates(graph.graph, plan)
    return _shrink(graphs, plan)


def _shrink(graphs: Mapping[str, ir.Model], plan: Plan) -> dict[str, ir.Model]:
    """Graphs with gates without what a plan drops; they are changed."""
    parts = {name: require_complete(part).model for name, part in shrink_parts(graphs, plan).items()}
    for model in parts.values():
        model.metadata_props[PLAN] = plan_digest({group.name: group.kept for group in plan.groups})
    return parts


def _write(graphs: Mapping[str, ir.Model], out: Path) -> None:
    """Write the graphs of a plan; nothing reads an encoder where no cross-attention has heads."""
    for name, model in graphs.items():
        if model.graph.outputs:
            graph_passes.save(model, out / name)


def build_plan(
    whole: CachedGraphs,
    plan: Plan,
    runtime: Target,
    workload: Workload,
    out: Path,
    threads: int | None,
    weights: WeightPrecision | None = None,
) -> CachedEngine:
    """The engines of a plan with the weights of the whole model, to time them.

    Args:
        workload: the sizes at which forms of operators are compared.
        out: folder of the graphs and engines, which exists.
        weights: the precision of the decoder's weights; None: floats.

    Raises:
        SiteRefusedError: a graph keeps units that the plan drops.
        InputError: the weights cannot be rounded.
    """
    _write(shrink_whole(whole, plan), out)
    runtime.build_sessions(out, whole.files, workload.contexts, threads)
    if weights is not None:
        round_engine(out, runtime, weights)
    return open_engines(runtime, out, threads)


def open_engines(runtime: Target, folder: Path, threads: int | None) -> CachedEngine:
    """Load the engines with caches that a target has built in a folder; `threads` None: one per core."""
    return CachedEngine.of(runtime.open_sessions(folder, provider="cpu", threads=threads))


def count_caches(whole: CachedGraphs, compressed: Path, workload: Workload) -> Generation:
    """The bytes of the caches of graphs for which there are no engines, and therefore no times.

    Args:
        compressed: folder of the shrunk graphs.
    """
    before, after = (bytes_per_token(graph_passes.load(folder / DECODER)) for folder in (whole.folder, compressed))
    return Generation(
        files=_present(whole, compressed),
        new_tokens=workload.new_tokens,
        dense_cache=before,
        compressed_cache=after,
    )


def _present(whole: CachedGraphs, folder: Path) -> tuple[str, ...]:
    """Names of the graphs that a folder has: nothing reads an encoder where no cross-attention has heads."""
    return tuple(name for name in whole.files if (folder / name).is_file())


def time_graphs(
    whole: CachedGraphs,
    engines: tuple[CachedEngine, CachedEngine],
    workload: Workload,
    *,
    seconds: float,
    seed: int,
    log: RunLog,
) -> Generation:
    """Time the engines with every unit and those of the plan, in turn, and count the bytes of their caches.

    Args:
        engines: the engines of the whole model, and the engines in the folder of the shrunk graphs.
    """
    texts = workload.feeds(whole.folder, engines[0].sessions.vocabulary)
    pairs = dict[Size, list[np.ndarray]]()
    for size, feeds in texts.items():
        with log.stage(f"timing dense and compressed, {size_label(*size)}") as on_progress:
            first, second = (engine.call(feeds) for engine in engines)
            pairs[size] = list(alternate_calls(first, second, seconds, on_progress=on_progress))
    pairs |= {size: _requests(pairs, calls) for size, calls in workload.requests.items()}
    before, after = (engine.sessions.bytes_per_token for engine in engines)
    return Generation(
        files=_present(whole, engines[1].path.parent),
        new_tokens=workload.new_tokens,
        precision=engines[1].sessions.precision,
        speeds=tuple(
            GenerationSpeed(phase=size.phase, speed=speed_of(times, batch=size.batch, seq=size.seq, seed=seed))
            for size, times in pairs.items()
            if size.phase is not None
        ),
        dense_cache=before,
        compressed_cache=after,
    )


def dense_engines(
    whole: CachedGraphs,
    runtime: Target,
    workload: Workload,
    threads: int | None,
    weights: WeightPrecision | None = None,
) -> CachedEngine:
    """The engines of the whole model, which are built once and stay beside its graphs; see `build_plan`."""
    dense = whole.folder / f"dense.{weights or 'fp32'}"
    if dense.is_dir():
        return open_engines(runtime, dense, threads)
    dense.mkdir()
    return build_plan(whole, whole.plan, runtime, workload, dense, threads, weights)


def _requests(pairs: Mapping[Size, Sequence[np.ndarray]], calls: Mapping[Size, float]) -> list[np.ndarray]:
    """Seconds of a request by both engines in each pair of rounds, `[engine, 1]`, from those of its calls.

    Args:
        pairs: size of a call -> seconds of the calls of both engines in each pair of rounds, `[engine, call]`.
        calls: size of each call of a request -> how often it is made.
    """
    medians = [
        [count * np.median(pair, axis=1, keepdims=True) for pair in pairs[size]] for size, count in calls.items()
    ]
    return [np.sum(parts, axis=0) for parts in zip(*medians, strict=False)]
