"""Groups of units of any graph: find them, and gate them by a plan."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.attention.find_groups import FoundGroups, search_groups
from graph_passes.passes import InsertGates, Normalize, SimplifyLookups
from graph_passes.plan import Plan


def find_groups(model: ir.Model) -> FoundGroups:
    """The heads of each attention and the neurons of each feed-forward that `shrink` can remove from a graph.

    The graph may be of any exporter. Where it takes images or sounds of free sizes, store those of an example first
    (`record_example_sizes`). A plan of these groups (`FoundGroup.plan`) can be applied to it:

    ```
    found = find_groups(model)
    plan = Plan(groups=tuple(group.plan(range(group.units // 2)) for group in found.groups))
    shrunk = shrink(model, plan)
    ```

    Args:
        model: the graph, which is normalized in place as `shrink` does, so that the nodes of the groups are its nodes.
    """
    Normalize()(model)
    SimplifyLookups()(model)
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
    Normalize()(model)
    SimplifyLookups()(model)
    return InsertGates(plan, gate_all=True)(model).model
