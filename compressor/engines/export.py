"""Export the model of a variant with its gates, and rehearse what can be removed from its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from compressor.config.sections import ExportConfig
from compressor.engines.build import ExportedGraph, shrink
from compressor.engines.prove import Case
from compressor.model_folder import ModelFolder
from compressor.results import VariantName
from compressor.units import PrunableGroup, Site, keep_all
from graph_passes import Plan, Shrunk


def _exporter_of(folder: ModelFolder) -> Any:
    """The module whose `export_proven` and `export_unproven` write graphs of a model."""
    return import_module(folder.access.exporter)


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
    """Write the graph of the gated model, with every unit still in it, and prove it against the model.

    Args:
        template: a graph of the same model in the same form, to reuse; None: export the model.

    Raises:
        InputError: the model cannot be exported, or does not run on a case.
        MismatchError: the graph computes something else than the model.
    """
    proof = _exporter_of(folder).export_proven(name, folder, plan, config, cases, out, template)
    return ExportedGraph(name, plan, out, proof)


def export_unproven(folder: ModelFolder, plan: Plan, config: ExportConfig, out: Path) -> None:
    """Write the graph of the gated model, with every unit still in it, to count what it consists of."""
    _exporter_of(folder).export_unproven(folder, plan, config, out)


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
    if isinstance(group, PrunableGroup):
        size = group.units // group.parts
        return tuple(unit for unit in range(group.units) if unit % size >= group.bundle)
    return tuple(range(group.heads // group.kv_heads, group.heads))


def rehearse(reference: Path, groups: Sequence[Site | PrunableGroup]) -> Shrunk:
    """Shrink the dense reference graph by the rehearsal plan; `refused` holds the groups that no plan can shrink."""
    return shrink(reference, rehearsal_plan(groups))
