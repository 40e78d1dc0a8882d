"""Entities in sequences of tags, by the rules of seqeval's default mode, and F1 over them.

A tag is a prefix and a type: `B-PER`. `B` begins an entity, `I` is inside one, `E` ends one, `S` is an entity of one
word, and `O` is outside. The rules read IOB1, IOB2, IOBES and BIOES alike; they are those of conlleval (CoNLL-2000), as
seqeval 1.2 has them:

1. `I` or `E` after `B` or `I` of the same type continues the entity.
2. Any other tag but `O` begins an entity; it ends before the next tag that does not continue it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_OUTSIDE = "O"
_PREFIXES = frozenset("BIES")


class Entity(NamedTuple):
    """An entity.

    Attributes:
        type: its type, e.g. `PER`.
        start: index of its first tag.
        end: index after its last tag.
    """

    type: str
    start: int
    end: int


def is_entity_tag(tag: str) -> bool:
    """Whether a tag is `O`, or a prefix with or without a type: `B-PER`, `B`."""
    prefix, dash, _ = tag.partition("-")
    return prefix in _PREFIXES or (prefix == _OUTSIDE and not dash)


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, in order.

    Args:
        tags: one for each word; see `is_entity_tag`.
    """
    entities = []
    start, previous_prefix, previous_type = 0, _OUTSIDE, ""
    for index, tag in enumerate((*tags, _OUTSIDE)):
        prefix, _, entity_type = tag.partition("-")
        if prefix in ("I", "E") and previous_prefix in ("B", "I") and entity_type == previous_type:  # rule 1
            previous_prefix = prefix
            continue
        if previous_prefix != _OUTSIDE:  # rule 2
            entities.append(Entity(previous_type, start, index))
        start, previous_prefix, previous_type = index, prefix, entity_type
    return entities


def entity_counts(predicted: Sequence[str], expected: Sequence[str]) -> tuple[int, int, int]:
    """Numbers of entities of a sentence that are predicted correctly, predicted, and expected.

    An entity is correct if its type and both bounds are.
    """
    predictions, entities = set(entities_of(predicted)), set(entities_of(expected))
    return len(predictions & entities), len(predictions), len(entities)


def entity_f1(statistics: np.ndarray) -> float:
    """F1 over all entities (micro average) from `entity_counts` of each row `[rows, 3]`; 0 without any entity."""
    correct, predicted, expected = statistics.sum(axis=0)
    return float(2 * correct / (predicted + expected)) if predicted + expected else 0.0
