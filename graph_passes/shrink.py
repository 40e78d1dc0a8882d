"""Shrink a graph by a plan: every pass, in order, and what they did."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from graph_passes.attention.gates import find_gates, set_gates
from graph_passes.block_sparse.masks import REACH, mask_name
from graph_passes.block_sparse.row_buckets import computed
from graph_passes.flow.axis_flow import Refusal
from graph_passes.passes import (
    CleanUp,
    DropUnusedBlocks,
    FoldGates,
    InsertGates,
    LowerBlockSparse,
    Normalize,
    RemoveEmptyAttention,
    RemoveHeads,
)
from graph_passes.plan import Plan, SitePlan


@dataclasses.dataclass(frozen=True)
class Removed:
    """Heads removed at one site: original ids, ascending."""

    site: str
    heads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A shrunk graph and what was done to it.

    Attributes:
        model: the graph. It computes what the graph given computes with the plan's gates.
        plan: as it was carried out: heads that their mask left nothing are dropped ones.
        removed: heads removed, one entry a site that lost any.
        folded: sites whose gates no longer cost a multiplication.
        refused: sites left whole, still gated as the plan says, and the operator in the way.
        parameters: elements of floating-point initializers (before, after); what the file keeps in `Constant` nodes
            counts in both.
        lowered: masked sites that compute the blocks of their mask alone.
        dense: sites that were to be lowered and stay dense and masked, and the operator in the way.
        unused: lowered site -> key blocks that no query looks at, so that their keys and values are not projected.
    """

    model: ir.Model
    plan: Plan
    removed: tuple[Removed, ...]
    folded: tuple[str, ...]
    refused: tuple[Refusal, ...]
    parameters: tuple[int, int]
    lowered: tuple[str, ...] = ()
    dense: tuple[Refusal, ...] = ()
    unused: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def obstacle(self) -> str | None:
        """The first site refused and the operator in the way, in words; None where nothing was refused."""
        if not self.refused:
            return None
        first, *more = self.refused
        return f"{min(first.sites)}: {first}" + (f" (and {len(more)} more)" if more else "")


def shrink(model: ir.Model, plan: Plan, *, lower: Collection[str] | None = None) -> Shrunk:
    """Remove the heads that a plan drops from a graph, physically, and of the others the blocks that its masks drop.

    A head of which a mask keeps nothing is a dropped head.

    Args:
        model: an ONNX graph with or without gates; it is edited in place.
        plan: which heads stay; its sites meet the graph's attention by gate, name or order. Masks must be in the graph.
        lower: masked sites to make block-sparse, where that can be; the others stay dense with their mask. None: all.

    Raises:
        PlanError: the plan's sites are not the graph's.
    """
    Normalize()(model)
    before = count_parameters(model)
    InsertGates(plan)(model)
    plan = plan.model_copy(update={"sites": tuple(_without_dead(site, plan, model.graph) for site in plan.sites)})
    set_gates(model.graph, plan)
    fold = FoldGates()
    fold(model)
    RemoveEmptyAttention()(model)
    remove = RemoveHeads()
    remove(model)
    CleanUp()(model)
    lowering = LowerBlockSparse(plan.masks, lower)
    unused = DropUnusedBlocks()
    if lowering(model).modified:
        unused(model)
        CleanUp()(model)
    if plan.masks:
        model.metadata_props[REACH] = json.dumps(_reach(plan, model.graph))
    left = frozenset(find_gates(model.graph))
    refused = frozenset().union(*(refusal.sites for refusal in remove.refused)) if remove.refused else frozenset()
    removed = tuple(
        Removed(site.name, site.dropped) for site in plan.sites if site.dropped and site.name not in refused
    )
    folded = tuple(site.name for site in plan.sites if site.name not in left)
    return Shrunk(
        model,
        plan,
        removed,
        folded,
        tuple(remove.refused),
        (before, count_parameters(model)),
        tuple(lowering.lowered),
        tuple(lowering.refused),
        unused.dropped,
    )


def _without_dead(site: SitePlan, plan: Plan, graph: ir.Graph) -> SitePlan:
    """The site without heads of which its mask keeps nothing that they could see."""
    mask = plan.masks.get(site.name)
    if mask is None or _padded(graph.initializers[mask_name(site.name)]):
        return site
    seen = computed(mask, causal=site.kind == "causal" and not mask.memory)
    kept = [place for place, head in enumerate(site.kept) if seen[head].any()]
    return dataclasses.replace(
        site, kept=tuple(site.kept[place] for place in kept), scale=tuple(site.scale[place] for place in kept)
    )


def _reach(plan: Plan, graph: ir.Graph) -> dict[str, int]:
    """Most positions that the masks reach over, by name of input: tokens `[batch, position]`, memories
    `[batch, position, hidden]`."""
    names = {value.name for value in graph.inputs}
    target = "decoder_input_ids" if "decoder_input_ids" in names else "input_ids"
    # Beside an image or a sound nobody can tell whose encoder a site is.
    source = "input_ids" if not names & {"pixel_values", "input_features", "input_values"} else ""
    found: dict[str, int] = {}
    for site in plan.sites:
        mask = plan.masks.get(site.name)
        if mask is None:
            continue
        asks = source if site.kind == "bidirectional" else target
        seen = source if site.kind == "cross" else asks
        sizes = [(asks, mask.queries), (seen, mask.keys)]
        sizes += [(str(name), mask.memory) for name in names if str(name).startswith("memory_")]
        for name, size in sizes:
            if name in names:
                found[name] = min(size, found.get(name, size))
    return found


def _padded(mask: ir.Value) -> bool:
    """Whether a mask's rows are lengthened by keys outside it, persistent vectors, which a head sees all the same."""
    readers = [node for node, _ in mask.uses()]
    while readers:
        node = readers.pop()
        if node.op_type == "Pad":
            return True
        if node.op_type in ("Cast", "Gather", "Identity", "Unsqueeze"):
            readers += [reader for reader, _ in node.outputs[0].uses()]
    return False


def count_parameters(model: ir.Model) -> int:
    """Elements of all floating-point initializers of at least one axis (scalars are arithmetic, not parameters)."""
    return sum(
        math.prod(value.const_value.shape.numpy())
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and value.const_value.dtype.is_floating_point()
        and len(value.const_value.shape) > 0
    )
