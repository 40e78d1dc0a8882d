"""The kind of a classifier's answers, and the names of its classes, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from transformers import PretrainedConfig

_DECLARED = "answer_kind"
"""Entry of a configuration that `declare_vector` writes."""


class AnswerKind(StrEnum):
    """The answers of a model to an example; values are those of `problem_type`, which selects the loss of a classifier.

    transformers has no `problem_type` for `VECTOR`, see `declare_vector`.
    """

    CLASS = "single_label_classification"
    """A class."""
    CLASSES = "multi_label_classification"
    """Any number of classes."""
    NUMBERS = "regression"
    """A number for each output."""
    VECTOR = "vector"
    """Numbers along any axes that count together, e.g. an embedding or the hidden states of all tokens."""


def answer_kind(config: PretrainedConfig) -> AnswerKind:
    """The kind of a classifier's answers; a single output is a number unless it is declared as a class."""
    problem = getattr(config, "problem_type", None)
    if problem == AnswerKind.CLASSES:
        return AnswerKind.CLASSES
    is_number = problem == AnswerKind.NUMBERS or (problem is None and getattr(config, "num_labels", None) == 1)
    return AnswerKind.NUMBERS if is_number else AnswerKind.CLASS


def several_answers(config: PretrainedConfig) -> AnswerKind | None:
    """The kind of answers that are any number of classes, several numbers, or a vector; None for other models."""
    if getattr(config, _DECLARED, None) == AnswerKind.VECTOR:
        return AnswerKind.VECTOR
    kind = answer_kind(config)
    is_several = kind is AnswerKind.CLASSES or (kind is AnswerKind.NUMBERS and (config.num_labels or 0) > 1)
    return kind if is_several else None


def declare_vector(config: PretrainedConfig, *, is_vector: bool) -> None:
    """Write into a configuration whether the scored output of the model is a vector."""
    setattr(config, _DECLARED, AnswerKind.VECTOR.value if is_vector else None)


def class_names(config: PretrainedConfig) -> list[str]:
    """The name, or else the number, of every class of a model in order."""
    names: Mapping[Any, str] = config.id2label or {}
    return [str(names.get(index, index)) for index in range(int(config.num_labels or 0))]


def has_default_names(config: PretrainedConfig) -> bool:
    """Whether the names of the classes are those that transformers generates."""
    return all(str(name) == f"LABEL_{index}" for index, name in (config.id2label or {}).items())
