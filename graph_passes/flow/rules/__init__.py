"""How each operator passes heads on: one table, from (domain, operator) to its rule."""

from collections.abc import Mapping

from graph_passes.flow.axis_flow import Rule
from graph_passes.flow.rules import attention, elementwise, layout, products, selection

RULES: Mapping[tuple[str, str], Rule] = {
    **elementwise.RULES,
    **layout.RULES,
    **products.RULES,
    **selection.RULES,
    **attention.RULES,
}

__all__ = ["RULES"]
