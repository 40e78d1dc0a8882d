"""What the results of a run have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

# JSON has no infinity: an error without bound is written as "Infinity" and read back as the number.
STRICT = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Row(BaseModel):
    """A frozen part of the results, which refuses fields that it does not have."""

    model_config = STRICT


def renamed_keys(fields: Any, former_names: Mapping[str, str]) -> Any:
    """The fields of a stored object under their current names."""
    if not isinstance(fields, dict):
        return fields
    return {former_names.get(name, name): value for name, value in fields.items()}
