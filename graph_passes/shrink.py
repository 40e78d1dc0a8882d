"""Find what can be removed from a graph, gate it, and shrink the graph by a plan: the passes in order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from graph_passes.attention.find_groups import GraphGroups, search_groups
from graph_passes.attention.gate_initializers import find_gates, set_gates
from graph_passes.attention.match_plan import weight_name
from graph_passes.block_sparse.masks import mask_name
from graph_passes.block_sparse.row_buckets import visible_blocks
from graph_passes.errors import GraphErrorCode, PlanError, listed
from graph_passes.flow.caches import cache_names
from graph_passes.flow.indices import Need
from graph_passes.flow.refusal import Refusal
from graph_passes.passes import (
    CleanUp,
    DropIdleCaches,
    DropUnusedBlocks,
    FoldComputedWeights,
    FoldGates,
    InsertGates,
    LowerBlockSparse,
    Normalize,
    RecordReach,
    RemoveDeadBranches,
    RemoveUnits,
    SeparateBiases,
    SimplifyLookups,
    StateCacheSizes,
    TransferWeights,
)
from graph_passes.passes.insert_gates import FINGERPRINT
from graph_passes.plan import Plan, SitePlan
from graph_passes.weights import MatchedWeight, WeightRecord, fingerprint, match_weights


def find_groups(model: ir.Model) -> GraphGroups:
    """The heads of each attention and the neurons of each feed-forward that `shrink` can remove from a graph.

    The graph may be of any exporter. Where it takes images or sounds of free sizes, store those of an example first
    (`record_example_sizes`). A plan of these groups (`GraphGroup.plan`) can be applied to it:

    ```
    groups = find_groups(model).groups
    plan = Plan(groups=tuple(group.plan(range(group.units // 2)) for group in groups))
    shrunk = shrink(model, plan)
    ```

    Args:
        model: the graph, which is normalized in place as `shrink` does, so that the nodes of the groups are its nodes.
    """
    _normalize(model)
    FoldComputedWeights()(model)
    return search_groups(model)


def gate_groups(model: ir.Model, plan: Plan) -> ir.Model:
    """Multiply the units of every group of a plan by gates, and keep all of them in the graph.

    Args:
        model: the graph, which is edited in place.
        plan: the groups, of which those that keep every unit get gates of ones.

    Returns:
        The graph, with an initializer `<group>.head_gate` or `<group>.neuron_gate` for each group.

    Raises:
        PlanError: the groups of the plan are not those of the graph.
    """
    _normalize(model)
    FoldComputedWeights()(model)
    return InsertGates(plan, gate_all=True)(model).model


@dataclasses.dataclass(frozen=True)
class GroupRemoval:
    """Units removed from one group.

    Attributes:
        group: name of the group.
        units: original ids of the removed heads or neurons, ascending.
    """

    group: str
    units: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A shrunk graph, and what was changed.

    Attributes:
        model: the graph. It computes what the original graph computes with the plan's gates.
        plan: the plan that was carried out, in which heads without any block of their mask are dropped.
        removed: removed units, one entry for each group that lost any.
        folded: names of the groups whose gates no longer cost a multiplication.
        refused: groups whose units stay in the graph, gated, with the operator that prevents their removal.
        parameters: number of elements of floating-point initializers before and after; `Constant` nodes of the file
            are counted.
        shared: groups whose dropped queries or keys are still computed, because a norm reads all heads; with that norm.
        lowered: names of the masked sites that compute only the blocks of their mask.
        dense: sites that were to be lowered but stay dense and masked, with the operator that prevents it.
        unused: lowered site -> number of key blocks that no query attends to and that are not projected any more.
        transferred: names of the parameters that have the weights of the plan now, in place of the original ones.
        caches: name of a cache's input -> for each axis the indices that it holds now (None: all), where it was cut.
    """

    model: ir.Model
    plan: Plan
    removed: tuple[GroupRemoval, ...]
    folded: tuple[str, ...]
    refused: tuple[Refusal, ...]
    parameters: tuple[int, int]
    shared: tuple[Refusal, ...] = ()
    lowered: tuple[str, ...] = ()
    dense: tuple[Refusal, ...] = ()
    unused: Mapping[str, int] = dataclasses.field(default_factory=dict)
    transferred: tuple[str, ...] = ()
    caches: Mapping[str, Need] = dataclasses.field(default_factory=dict)

    @property
    def obstacle(self) -> str | None:
        """The first refused group with the operator that prevents its removal, in words; None if none was refused."""
        if not self.refused:
            return None
        first, *more = self.refused
        return f"{min(first.sites)}: {first}" + (f" (and {len(more)} more)" if more else "")


def shrink(
    model: ir.Model,
    plan: Plan,
    *,
    lower: Collection[str] | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    returned: Mapping[str, Need] | None = None,
) -> Shrunk:
    """Remove the units that a plan drops from a graph, and the blocks that its masks drop from the heads kept.

    A head whose mask keeps no block is removed as well.

    Args:
        model: an ONNX graph with or without gates, which is edited in place.
        plan: the units to keep. Its sites are paired with the graph's attentions by gate, name or order, its
            feed-forwards with products by gate, values of the weight or name, and the graph must contain its masks.
        lower: names of the masked sites to make block-sparse; other masked sites stay dense. None: all.
        weights: name of a parameter -> the values that the plan belongs to, e.g. `WeightFile`. They replace the values
            that the parameter had before the plan's run changed it. None: the graph must have them.
        returned: name of an output -> the indices that a graph which reads it as a cache needs, from `Shrunk.caches` of
            that graph. An output that is refused stays whole, and is among the sites of `Shrunk.refused`.

    Raises:
        PlanError: the plan's groups are not those of the graph, its units are removed already, a mask is missing, or
            the graph has other weights than the plan.
        ValueError: a name of `lower` that has no mask in the plan.
    """
    _check_masked(lower or (), plan)
    _normalize(model)
    parameters_before = count_parameters(model)
    matches, transferred = _transfer_weights(model, plan, weights)
    FoldComputedWeights()(model)
    InsertGates(plan, matches)(model)
    plan = plan.replace_groups(_without_masked_heads(site, plan, model.graph) for site in plan.sites)
    set_gates(model.graph, plan)
    FoldGates()(model)
    RemoveDeadBranches()(model)
    DropIdleCaches()(model)
    removal = RemoveUnits(returned)(model)
    CleanUp()(model)
    lowering = LowerBlockSparse(plan.masks, lower)(model)
    unused: Mapping[str, int] = {}
    if lowering.modified:
        unused = DropUnusedBlocks()(model).report
        CleanUp()(model)
    RecordReach(plan)(model)
    refused = removal.report.refused
    gates = find_gates(model.graph)
    return Shrunk(
        model=model,
        plan=plan,
        removed=_removed(plan, refused),
        folded=tuple(group.name for group in plan.groups if group.name not in gates),
        refused=refused,
        shared=removal.report.shared,
        parameters=(parameters_before, count_parameters(model)),
        lowered=lowering.report.lowered,
        dense=lowering.report.refused,
        unused=unused,
        transferred=transferred,
        caches=removal.report.caches,
    )


def _check_masked(names: Collection[str], plan: Plan) -> None:
    if unknown := sorted(set(names) - plan.masks.keys()):
        raise ValueError(f"lower: {listed(unknown)}: no mask in the plan; use its masked sites, {listed(plan.masks)}")


def shrink_parts(models: Mapping[str, ir.Model], plan: Plan) -> dict[str, Shrunk]:
    """Remove the units that a plan drops from the graphs of one model, such as an encoder and its decoder.

    A graph that returns the content of another graph's cache (`flow.caches`) returns the heads that are read of it, and
    may have no outputs left.

    Args:
        models: name of a graph -> the graph with gates, in the order in which they run; they are edited in place.
        plan: the units to keep of all graphs.

    Returns:
        For each graph the result of `shrink` with its part of the plan.

    Raises:
        PlanError: see `shrink`; or a group of the plan is in none of the graphs, or a graph cannot return fewer heads.
    """
    parts: dict[str, Shrunk] = {}
    returned: dict[str, Need] = {}
    unread: set[str] = set()
    names = {name: frozenset(find_gates(model.graph)) for name, model in models.items()}
    if missing := [group.name for group in plan.groups if not any(group.name in gates for gates in names.values())]:
        message = f"group {missing[0]} is in none of the graphs {listed(models)}; use the plan of this model"
        raise PlanError(message, code=GraphErrorCode.SITE_MISSING, site=missing[0])
    for name, model in reversed(list(models.items())):
        outputs = cache_names(model)
        model.graph.outputs[:] = [value for value in model.graph.outputs if value.name not in unread]
        part = plan.part(names[name]) if model.graph.outputs else Plan(groups=())  # no gates and weights are left
        parts[name] = shrunk = shrink(model, part, returned=returned)
        for refusal in shrunk.refused:
            if output := min(refusal.sites & returned.keys(), default=None):
                raise PlanError(
                    f"{name}: the output {output} cannot lose the heads that no other graph reads ({refusal}); keep"
                    " every head of the cross-attentions",
                    code=GraphErrorCode.SITE_MISMATCH,
                    site=output,
                )
        returned |= {outputs[cache]: need for cache, need in shrunk.caches.items()}
        unread |= set(outputs.values()) - set(cache_names(shrunk.model).values())
    return {name: parts[name] for name in models}


def _normalize(model: ir.Model) -> None:
    Normalize()(model)
    SeparateBiases()(model)
    SimplifyLookups()(model)
    StateCacheSizes()(model)


def _transfer_weights(
    model: ir.Model, plan: Plan, weights: Mapping[str, np.ndarray] | None
) -> tuple[Mapping[str, MatchedWeight], tuple[str, ...]]:
    """Give the graph the weights of the plan; returns the parameters whose values are known, and the replaced ones."""
    if find_gates(model.graph) and plan.model is not None and model.metadata_props.get(FINGERPRINT) == plan.model:
        return {}, ()
    records = dict(plan.weights)
    for name in map(weight_name, plan.feed_forwards):
        if name not in records and weights is not None and name in weights:
            values = fingerprint(weights[name])
            records[name] = WeightRecord(values, values)
    matches = match_weights(model.graph, records)
    transferred = TransferWeights(records, matches, weights)(model).report
    if transferred and model.metadata_props.pop(FINGERPRINT, None) is not None and plan.model is not None:
        model.metadata_props[FINGERPRINT] = plan.model
    return matches, transferred


def count_parameters(model: ir.Model) -> int:
    """Number of elements of the floating-point initializers, without scalars, which are constants of arithmetic."""
    return sum(
        math.prod(value.const_value.shape.numpy())
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and value.const_value.dtype.is_floating_point()
        and len(value.const_value.shape) > 0
    )


def _removed(plan: Plan, refused: Collection[Refusal]) -> tuple[GroupRemoval, ...]:
    """The units that are gone: those that the plan drops, except in refused groups."""
    refused_groups = frozenset(name for refusal in refused for name in refusal.sites)
    return tuple(
        GroupRemoval(group.name, group.dropped)
        for group in plan.groups
        if group.dropped and group.name not in refused_groups
    )


def _without_masked_heads(site: SitePlan, plan: Plan, graph: ir.Graph) -> SitePlan:
    """The site without the heads whose mask keeps no key that causality leaves visible."""
    mask = plan.masks.get(site.name)
    if mask is None or _is_padded(graph.initializers[mask_name(site.name)]):
        return site
    visible = visible_blocks(mask, causal=site.kind == "causal" and not mask.memory)
    kept = [(head, scale) for head, scale in zip(site.kept, site.scale, strict=True) if visible[head].any()]
    return dataclasses.replace(site, kept=tuple(head for head, _ in kept), scale=tuple(scale for _, scale in kept))


def _is_padded(mask: ir.Value) -> bool:
    """Whether the rows of a mask are extended by persistent vectors, which every head attends to."""
    readers = [node for node, _ in mask.uses()]
    while readers:
        node = readers.pop()
        if node.op_type == "Pad":
            return True
        if node.op_type in ("Cast", "Gather", "Identity", "Unsqueeze"):
            readers += [reader for reader, _ in node.outputs[0].uses()]
    return False
