"""The names of a model's classes, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig


def class_names(config: PretrainedConfig) -> list[str]:
    """The name of every class of a model in order; the number of one that has no name."""
    names: Mapping[Any, str] = config.id2label or {}
    return [str(names.get(index, index)) for index in range(int(config.num_labels or 0))]


def has_default_names(config: PretrainedConfig) -> bool:
    """Whether the names of the classes are those that transformers generates."""
    return all(str(name) == f"LABEL_{index}" for index, name in (config.id2label or {}).items())
