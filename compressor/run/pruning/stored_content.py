"""The content of files that an interrupted run goes on from, which holds for the same model, rows and machine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class StoredContent(BaseModel):
    """The base of such content. A subclass narrows the type of the key and adds what is stored.

    Attributes:
        key: everything that the content depends on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    key: Any

    @classmethod
    def read(cls, path: Path, key: object) -> Self | None:
        """The content of a file; None without a file, or if it is damaged or has another key."""
        try:
            stored = cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None
        return stored if stored.key == key else None
