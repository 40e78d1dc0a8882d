"""The rules of all operators, by (domain, operator type)."""

from collections.abc import Mapping

from graph_passes.flow.rule import Rule
from graph_passes.flow.rules import (
    attention,
    convolutions,
    elementwise,
    layout,
    lookups,
    products,
    quantization,
    reshape,
    selection,
    slicing,
)

RULES: Mapping[tuple[str, str], Rule] = {
    **elementwise.RULES,
    **layout.RULES,
    **reshape.RULES,
    **products.RULES,
    **convolutions.RULES,
    **quantization.RULES,
    **slicing.RULES,
    **selection.RULES,
    **lookups.RULES,
    **attention.RULES,
}

__all__ = ["RULES"]
