"""What can go wrong with a graph or a plan: a code for programs, and one line that says what, why and how to mend."""

from enum import StrEnum
from typing import Any


class GraphErrorCode(StrEnum):
    """What went wrong, as programs and tests read it: codes stay while messages may change."""

    UNSPECIFIED = "unspecified"
    FILE_MISSING = "file-missing"
    FILE_UNREADABLE = "file-unreadable"
    """A file is damaged, or holds something else than its name says."""


class GraphPassError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: one line: what, why, how to mend.
        code: what went wrong.
        details: what it happened to, by name, e.g. `site="encoder.layer.0"`, `path=Path("plan.json")`.
    """

    def __init__(self, message: str = "", *, code: GraphErrorCode = GraphErrorCode.UNSPECIFIED, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class PlanError(GraphPassError):
    """A plan that does not read, does not validate, or belongs to another model."""


class GraphError(GraphPassError):
    """An ONNX file that does not read: truncated, data missing or outside its folder, not a graph of a transformer."""
