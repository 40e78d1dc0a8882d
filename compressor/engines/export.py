"""Export the model of a variant with its gates, and rehearse what can be removed from its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from compressor.config.sections import ExportConfig
from compressor.engines.build import ExportedGraph, shrink
from compressor.engines.prove import Case
from compressor.engines.prove_export import prove_export, require_export
from compressor.export import export_reference, rewrite_reference
from compressor.model_folder import ModelFolder, example_inputs, example_rows, fresh_model
from compressor.model_folder.processor import IMAGES
from compressor.results import VariantName
from compressor.units import PrunableGroup, Site, keep_all
from graph_passes import Plan, Shrunk


def export_graph(
    name: VariantName,
    folder: ModelFolder,
    plan: Plan,
    config: ExportConfig,
    cases: Sequence[Case],
    out: Path,
    *,
    template: ExportedGraph | None = None,
) -> ExportedGraph:
    """Export the gated model, with every unit still in it, and prove the graph.

    The reference of the proof is the folder, loaded afresh: with its own weights for the dense variant, and with those
    of the model for others, which may have been trained.

    Tracing the model takes most of the time of an export. A graph of the same model with another plan is therefore
    reused, with new gates and weights, if the proof then holds.

    Args:
        name: name of the variant.
        folder: the model.
        plan: the plan, with one entry for each site.
        config: operator set and form of attention of the graph.
        cases: inputs of the proof.
        out: file to write.
        template: a graph of the same model in the same form, to reuse; None: export the model.

    Raises:
        InputError: the graph computes something else than the model, which changes at an input, or chooses among equal
            scores.
        MismatchError: the graph computes something else than the model.
    """
    model = fresh_model(folder, trained=name != "dense")
    if template is not None and rewrite_reference(template.path, folder.model, plan, out):
        proof = prove_export(model, plan, out, cases, name, attention=config.attention)
        if proof.holds:
            return ExportedGraph(name, plan, out, proof)
    export_unproven(folder, plan, config, out)
    prove = partial(prove_export, model, plan, out, cases, name, attention=config.attention)
    return ExportedGraph(name, plan, out, require_export(prove, model, cases))


def export_unproven(folder: ModelFolder, plan: Plan, config: ExportConfig, out: Path) -> None:
    """Export the gated model, with every unit still in it, to count what it consists of."""
    inputs = example_inputs(folder, batch=2, seq=8)
    fixed = () if folder.image_size is None else (IMAGES,)
    export_reference(
        folder.model,
        plan,
        inputs,
        out,
        opset=config.opset,
        attention=config.attention,
        fixed=fixed,
        example=example_rows(folder),
    )


def rehearsal_plan(groups: Sequence[Site | PrunableGroup]) -> Plan:
    """A plan that drops the fewest units everywhere: the first neuron, or the first heads that can go.

    Those are the query heads of the first key/value head, or the first query head of each key/value head where these
    are removed one by one. A group that cannot be shrunk by this plan cannot be shrunk by any plan. The rehearsal
    detects it before hours of learning.
    """
    dense = keep_all(groups)
    kept = {group.name: _rehearsed(group) for group in groups}
    return dense.replace_groups(replace(group, kept=kept[group.name], scale=()) for group in dense.groups)


def _rehearsed(group: Site | PrunableGroup) -> tuple[int, ...]:
    """The units of a group that a rehearsal keeps."""
    if isinstance(group, PrunableGroup):
        size = group.units // group.parts
        return tuple(unit for unit in range(group.units) if unit % size >= group.bundle)
    return tuple(range(group.heads // group.kv_heads, group.heads))


def rehearse(reference: Path, groups: Sequence[Site | PrunableGroup]) -> Shrunk:
    """Shrink the dense reference graph by the rehearsal plan; `refused` holds the groups that no plan can shrink."""
    return shrink(reference, rehearsal_plan(groups))
