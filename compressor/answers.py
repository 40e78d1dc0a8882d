"""What a model answers: the kind of its answers, the names of its classes and outputs, and the scored positions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LABELS = "labels"
IGNORED = -100
"""Label of a position that is not scored."""
SPAN_ENDS = ("start_logits", "end_logits")
"""Outputs that are logits over the positions of a text."""
EMBEDDING, STATES, RANKING = "sentence_embedding", "last_hidden_state", "document_scores"
"""Outputs of an encoder with a pooling: embeddings, states of tokens, and scores of documents."""
MASK, DECODER_IDS, DECODER_MASK = "attention_mask", "decoder_input_ids", "decoder_attention_mask"
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


def scored_mask(batch: Mapping[str, np.ndarray], rows: int, positions: int) -> np.ndarray:
    """The scored positions of an output `[batch, position, ...]`, bool `[batch, position]`.

    These are the positions with a label if the batch has labels of positions, else those of the attention mask of
    encoder or decoder, else all.
    """
    attention = DECODER_MASK if DECODER_IDS in batch or DECODER_MASK in batch else MASK
    labels, mask = batch.get(LABELS), batch.get(attention)
    if labels is not None and labels.shape == (rows, positions) and labels.dtype.kind != "f":
        return np.asarray(labels != IGNORED)
    if mask is not None and mask.shape == (rows, positions):
        return np.asarray(mask != 0)
    return np.ones((rows, positions), bool)
