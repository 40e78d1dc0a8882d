"""One side of the comparison: a plan, exported, shrunk, built, and proven at every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import graph_passes
from compressor.config.run import Recipe
from compressor.errors import SiteRefusedError
from compressor.export import export_reference
from compressor.model_folder import ModelFolder, example_inputs
from compressor.progress import Listener
from compressor.report import Proof
from compressor.run import verify
from compressor.run.verify import Case
from compressor.targets import ENGINE_FILES, BuildOptions, Engine, target
from compressor.units import Site, keep_all
from compressor.workdir import WorkDir
from graph_passes import Plan, Refusal, Shrunk


@dataclass(frozen=True)
class Variant:
    """What came out of one plan.

    Attributes:
        name: `dense` or `compressed`.
        plan: as it was carried out, see `graph_passes.Shrunk`.
        reference: the gated graph, every head still there.
        graph: the shrunk graph.
        engine: what the runtime runs.
        proofs: every step against the one before.
        lowered: masked sites that are block-sparse in `graph`.
        dense: masked sites that were to be, and the operator in the way.
        unused: site -> key blocks that are not projected there.
    """

    name: verify.VariantName
    plan: Plan
    reference: Path
    graph: Path
    engine: Engine
    proofs: tuple[Proof, ...]
    lowered: tuple[str, ...] = ()
    dense: tuple[Refusal, ...] = ()
    unused: Mapping[str, int] = field(default_factory=dict)


def build(
    name: verify.VariantName,
    folder: ModelFolder,
    plan: Plan,
    recipe: Recipe,
    tried: Sequence[Case],
    work: WorkDir,
    listen: Listener,
    lower: Collection[str] = (),
    tuning: BuildOptions | None = None,
) -> Variant:
    """Export, shrink and build the model with a plan, and prove each step.

    Args:
        name: which side this is.
        folder: the model.
        plan: one entry for each of its sites.
        recipe: how to export and build.
        tried: inputs of the proofs.
        work: gets `model.onnx`, the shrunk graph, and the engine, what the runtime loads: those of the compressed side
            go into its result.
        listen: hears of the stages.
        lower: masked sites to make block-sparse.
        tuning: sizes that the engine must take.

    Raises:
        SiteRefusedError: a site cannot be shrunk as the plan asks.
        MismatchError: two steps do not compute the same.
        TargetMissingError: the runtime or its device is not there.
    """
    place = work.result if name == "compressed" else work.scratch / name
    place.mkdir(exist_ok=True)
    reference, graph = work.scratch / f"{name}.reference.onnx", place / "model.onnx"
    with listen.stage(f"{name}: exporting the graph"):
        inputs = example_inputs(folder, batch=2, seq=8)
        export_reference(
            folder.model, plan, inputs, reference, opset=recipe.export.opset, attention=recipe.export.attention
        )
        exported = verify.prove_export(folder.model, plan, reference, tried, name, attention=recipe.export.attention)
        verify.require(exported)
    with listen.stage(f"{name}: shrinking it"):
        shrunk = require(shrink(reference, plan, lower))
        graph_passes.save(shrunk.model, graph)
        same = verify.require(verify.prove_shrunk(reference, graph, tried, name))
    with listen.stage(f"{name}: building the engine"):
        engine = make_engine(graph, place, recipe, tuning)
        runs = verify.require(verify.prove_engine(graph, engine, tried, name))
    proofs, blocks = (exported, same, runs), (shrunk.lowered, shrunk.dense, shrunk.unused)
    return Variant(name, shrunk.plan, reference, graph, engine, proofs, *blocks)


def make_engine(graph: Path, folder: Path, recipe: Recipe, tuning: BuildOptions | None) -> Engine:
    """Build a graph's engine as a recipe asks, in a folder, under the name that its runtime has for it."""
    return target(recipe.engine.target)(
        graph,
        folder / ENGINE_FILES[recipe.engine.target],
        precision=recipe.engine.precision,
        provider=recipe.engine.provider,
        threads=recipe.engine.threads,
        tuning=tuning,
    )


def cpu_fallback(recipe: Recipe) -> Recipe:
    """The recipe with ONNX Runtime on the CPU in its target's place, which proves what the target cannot here."""
    return recipe.updated(target="ort", precision="fp32", provider="cpu")


def shrink(reference: Path, plan: Plan, lower: Collection[str] = ()) -> Shrunk:
    """The graph without the heads that the plan drops, and block-sparse at the sites to `lower`."""
    return graph_passes.shrink(graph_passes.load(reference), plan, lower=lower)


def require(shrunk: Shrunk) -> Shrunk:
    """What was shrunk, if nothing was refused.

    Raises:
        SiteRefusedError: a site was; the message names the operator in the way.
    """
    if shrunk.obstacle:
        raise SiteRefusedError(
            f"{shrunk.obstacle}; keep every head of the site in a plan of your own (--plan), or try --attention sdpa or"
            " --opset 23"
        )
    return shrunk


def rehearsal_plan(sites: Sequence[Site]) -> Plan:
    """A plan that drops the first key/value head of every site, with all that read it.

    Sites that it cannot shrink, no plan can: that is known before hours of learning.
    """
    dense = keep_all(sites).sites
    return Plan(sites=tuple(replace(site, kept=site.kept[site.heads // site.kv_heads :], scale=()) for site in dense))
