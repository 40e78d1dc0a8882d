"""The errors of graphs and plans: a code for programs, and a message of one line (what, why, how to mend)."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any


class GraphErrorCode(StrEnum):
    """The kind of an error, for programs and tests. Codes are stable; messages may change."""

    UNSPECIFIED = "unspecified"
    FILE_MISSING = "file-missing"
    FILE_UNREADABLE = "file-unreadable"
    """A file is damaged, or its content is not what its name says."""
    UNSAFE_PATH = "unsafe-path"
    """The external data of a graph are outside the graph's folder."""
    INVALID_PLAN = "invalid-plan"
    """A plan breaks its schema, or one of its masks has an impossible shape."""
    UNSUPPORTED_OPSET = "unsupported-opset"
    """A graph is of an operator set that a pass cannot rewrite."""
    UNSUPPORTED_OPERATOR = "unsupported-operator"
    """An operator of the graph cannot be expressed in the form that was requested."""
    SITE_MISSING = "site-missing"
    """A group of the plan is not in the graph, or an attention of the graph is not in the plan."""
    SITE_AMBIGUOUS = "site-ambiguous"
    """A group of the plan matches several attentions or products of the graph, or the reverse; or initializers."""
    SITE_MISMATCH = "site-mismatch"
    """Sites of the plan and attentions of the graph differ in their number, heads, widths or kinds."""
    ALREADY_SHRUNK = "already-shrunk"
    """The graph lacks the heads that the plan drops."""
    MODEL_MISMATCH = "model-mismatch"
    """The plan and the graph were made from models of different fingerprints."""
    WEIGHTS_MISSING = "weights-missing"
    """The graph lacks the weights that the plan belongs to, and they are not beside the plan either."""
    MASK_MISSING = "mask-missing"
    """A site has a block mask in the plan and none in the graph."""


class GraphPassError(Exception):
    """Base of the errors that this package raises.

    Args:
        message: one line: what is wrong, why, and how to mend it.
        code: the kind of error.
        details: affected objects by name, e.g. `site="encoder.layer.0"`, `path=Path("plan.json")`.
    """

    def __init__(self, message: str = "", *, code: GraphErrorCode = GraphErrorCode.UNSPECIFIED, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class PlanError(GraphPassError):
    """A plan cannot be read, breaks its schema, or belongs to another model."""


class GraphError(GraphPassError):
    """An ONNX graph cannot be read or rewritten: truncated, data missing or unsafe, operators not supported."""


def listed(names: Iterable[str], limit: int = 4) -> str:
    """At most `limit` names as text, without repeats, and the number of the others."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - limit
    return ", ".join(distinct[:limit]) + (f" and {more} more" if more > 0 else "")
