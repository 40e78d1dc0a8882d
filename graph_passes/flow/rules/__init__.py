"""The rules of all operators, by (domain, operator type)."""

from collections.abc import Mapping

from graph_passes.flow.rule import Rule
from graph_passes.flow.rules import attention, elementwise, layout, products, reshape, selection, slicing

RULES: Mapping[tuple[str, str], Rule] = {
    **elementwise.RULES,
    **layout.RULES,
    **reshape.RULES,
    **products.RULES,
    **slicing.RULES,
    **selection.RULES,
    **attention.RULES,
}

__all__ = ["RULES"]
