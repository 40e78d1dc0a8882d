"""What the logits `[rows, outputs]` of a classifier stand for, by its configuration."""

from __future__ import annotations

from enum import StrEnum

from transformers import PretrainedConfig


class AnswerKind(StrEnum):
    """The answers of a classifier to a row; the values are those of `problem_type`, from which transformers' loss
    follows too."""

    CLASS = "single_label_classification"
    """One class of several."""
    CLASSES = "multi_label_classification"
    """Any number of classes."""
    NUMBERS = "regression"
    """One number for each output."""


def answer_kind(config: PretrainedConfig) -> AnswerKind:
    """The kind of a classifier; one number where a single output is not declared as a class."""
    problem = getattr(config, "problem_type", None)
    if problem == AnswerKind.CLASSES:
        return AnswerKind.CLASSES
    is_number = problem == AnswerKind.NUMBERS or (problem is None and getattr(config, "num_labels", None) == 1)
    return AnswerKind.NUMBERS if is_number else AnswerKind.CLASS


def several_answers(config: PretrainedConfig) -> AnswerKind | None:
    """The kind of a classifier whose answer to a row is any number of classes or several numbers; None for others."""
    kind = answer_kind(config)
    is_several = kind is AnswerKind.CLASSES or (kind is AnswerKind.NUMBERS and (config.num_labels or 0) > 1)
    return kind if is_several else None
