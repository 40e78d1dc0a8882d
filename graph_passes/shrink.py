"""Shrink a graph by a plan: every pass, in order, and what they did."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from graph_passes.axes import Refusal
from graph_passes.gates import find_gates, set_gates
from graph_passes.passes import CleanUp, FoldGates, InsertGates, Normalize, RemoveEmptyAttention, RemoveHeads
from graph_passes.plan import Plan


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
        removed: heads removed, one entry a site that lost any.
        folded: sites whose gates no longer cost a multiplication.
        refused: sites left whole, still gated as the plan says, and the operator in the way.
        parameters: elements of floating-point initializers (before, after); what the file keeps in `Constant` nodes
            counts in both.
    """

    model: ir.Model
    removed: tuple[Removed, ...]
    folded: tuple[str, ...]
    refused: tuple[Refusal, ...]
    parameters: tuple[int, int]

    @property
    def obstacle(self) -> str | None:
        """The first site refused and the operator in the way, in words; None where nothing was refused."""
        if not self.refused:
            return None
        first, *more = self.refused
        return f"{min(first.sites)}: {first}" + (f" (and {len(more)} more)" if more else "")


def shrink(model: ir.Model, plan: Plan) -> Shrunk:
    """Remove the heads that a plan drops from a graph, physically.

    Args:
        model: an ONNX graph with or without gates; it is edited in place.
        plan: which heads stay; its sites meet the graph's attention by gate, name or order.

    Raises:
        PlanError: the plan's sites are not the graph's.
    """
    Normalize()(model)
    before = count_parameters(model)
    InsertGates(plan)(model)
    set_gates(model.graph, plan)
    fold = FoldGates()
    fold(model)
    RemoveEmptyAttention()(model)
    remove = RemoveHeads()
    remove(model)
    CleanUp()(model)
    left = frozenset(find_gates(model.graph))
    refused = frozenset().union(*(refusal.sites for refusal in remove.refused)) if remove.refused else frozenset()
    removed = tuple(
        Removed(site.name, site.dropped) for site in plan.sites if site.dropped and site.name not in refused
    )
    folded = tuple(site.name for site in plan.sites if site.name not in left)
    return Shrunk(model, removed, folded, tuple(remove.refused), (before, count_parameters(model)))


def count_parameters(model: ir.Model) -> int:
    """Elements of all floating-point initializers of at least one axis (scalars are arithmetic, not parameters)."""
    return sum(
        math.prod(value.const_value.shape.numpy())
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and value.const_value.dtype.is_floating_point()
        and len(value.const_value.shape) > 0
    )
