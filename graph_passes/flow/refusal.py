"""Refusals: why a site is left unchanged, as a code, the operator that prevents the change, and a sentence."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class RefusalCode(StrEnum):
    """Why an operator prevents a change, for programs and tests. Codes are stable; sentences may change."""

    UNSPECIFIED = "unspecified"

    # Heads on their way through the graph.
    NO_RULE = "no-rule"
    """The operator has no rule in `flow.rules`."""
    UNSUPPORTED_FORM = "unsupported-form"
    """The operator's rule does not cover these attributes, axes or inputs."""
    MIXES_HEADS = "mixes-heads"
    """Every output index depends on all indices of the heads' axis."""
    EVERY_HEAD_NEEDED = "every-head-needed"
    """A tensor is pruned for one reader while another reader needs all of its heads."""
    NOT_LINEAR = "not-linear"
    """The output is not a product with the gated tensor, so heads that are zero do not stay zero."""
    COMPUTED_VALUE = "computed-value"
    """The operator reads indices, sizes or axes that are computed at run time."""
    UNKNOWN_SHAPE = "unknown-shape"
    FREE_SIZE = "free-size"
    """The operator splits or joins an axis whose size depends on the graph's inputs."""
    INSEPARABLE_HEADS = "inseparable-heads"
    """A reshape spreads the heads over several axes, from which single heads cannot be removed."""
    GRAPH_INPUT = "graph-input"
    """The caller of the graph provides heads that the plan drops."""
    GRAPH_OUTPUT = "graph-output"
    """The graph returns heads that the plan drops."""

    CACHE = "cache"
    """The graph reads or returns keys and values of earlier positions."""
    QUANTIZED = "quantized"
    """The operator multiplies integers; the float graph can be pruned, and quantized afterwards."""

    # Masked attention on its way to block-sparse attention.
    UNSUPPORTED_MASK = "unsupported-mask"
    """The block mask, or the mask that it is combined with, has a form that block-sparse attention cannot compute."""
    UNMATCHED_ATTENTION = "unmatched-attention"
    """The operators around the mask are not those of an attention that block-sparse attention computes."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why sites are left unchanged: the operator that prevents the change.

    Attributes:
        sites: names of the sites whose heads reach the operator.
        op: operator type, or `graph output`, `graph input`, `mask`.
        node: name of the node, or of the graph's input or output.
        why: the reason, as a clause whose subject is the operator.
        code: the kind of obstacle.
        value: name of the affected tensor, if the obstacle concerns one.
    """

    sites: frozenset[str]
    op: str
    node: str
    why: str
    code: RefusalCode = RefusalCode.UNSPECIFIED
    value: str = ""

    def __str__(self) -> str:
        return f"{f'{self.op} {self.node}'.rstrip()}: {self.why}"
