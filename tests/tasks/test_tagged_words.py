"""Entities are those that seqeval finds in its default mode, whatever the scheme of the tags."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import f1_score

from compressor.tasks.token_labels import Entity, entities_of, entity_counts, entity_f1, is_entity_tag

TYPES = ("PER", "LOC", "A-B")
TAGS = ("O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in TYPES))
SEQUENCES = st.lists(st.sampled_from(TAGS), max_size=12)


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("", []),
        ("O O", []),
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("I-PER I-PER O I-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),  # IOB1
        ("I-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),  # IOB1: B divides neighbours
        ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),  # a type that changes begins an entity
        ("B-PER I-PER E-PER S-LOC O", [("PER", 0, 3), ("LOC", 3, 4)]),  # IOBES
        ("S-PER I-PER", [("PER", 0, 1), ("PER", 1, 2)]),  # nothing continues S ...
        ("E-PER E-PER I-PER", [("PER", 0, 1), ("PER", 1, 2), ("PER", 2, 3)]),  # ... or E
        ("O E-PER", [("PER", 1, 2)]),  # E without a beginning is an entity
        ("B I O S", [("", 0, 2), ("", 3, 4)]),  # tags without types
        ("B-A-B I-A-B I-A", [("A-B", 0, 2), ("A", 2, 3)]),  # a type may have a dash
    ],
)
def test_entities_by_hand(tags: str, entities: list[tuple[str, int, int]]) -> None:
    assert entities_of(tags.split()) == [Entity(*entity) for entity in entities]


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, list[Entity]]:
    """A number of words, and entities among them in order."""
    words = draw(st.integers(0, 14))
    bounds = sorted(draw(st.sets(st.integers(0, words))))
    entities = [Entity(draw(st.sampled_from(TYPES)), *bound) for bound in pairwise(bounds) if draw(st.booleans())]
    return words, entities


@settings(max_examples=40, deadline=None)
@given(spans(), st.sampled_from(["IOB1", "IOB2", "IOBES"]))
def test_entities_survive_every_scheme(example: tuple[int, list[Entity]], scheme: str) -> None:
    words, entities = example
    tags = ["O"] * words
    previous = Entity("", -1, -1)
    for entity in entities:
        divides = previous.end == entity.start and previous.type == entity.type
        prefixes = ["I"] * (entity.end - entity.start)
        if scheme != "IOB1" or divides:
            prefixes[0] = "B"
        if scheme == "IOBES":
            prefixes[-1] = "E" if len(prefixes) > 1 else "S"
        tags[entity.start : entity.end] = [f"{prefix}-{entity.type}" for prefix in prefixes]
        previous = entity
    assert entities_of(tags) == entities


@settings(max_examples=40, deadline=None)
@given(SEQUENCES)
def test_entities_cover_the_words_that_are_not_outside(tags: list[str]) -> None:
    covered = [index for entity in entities_of(tags) for index in range(entity.start, entity.end)]
    assert covered == [index for index, tag in enumerate(tags) if tag != "O"]
    for entity in entities_of(tags):
        assert {tags[index].partition("-")[2] for index in range(entity.start, entity.end)} == {entity.type}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(SEQUENCES.flatmap(lambda tags: st.permutations(tags).map(lambda shuffled: (tags, shuffled))), min_size=1)
)
def test_f1_is_that_of_seqeval(rows: list[tuple[list[str], list[str]]]) -> None:
    expected, predicted = ([list(row[side]) for row in rows] for side in (0, 1))
    counts = np.array([entity_counts(*pair) for pair in zip(predicted, expected, strict=True)], float)
    assert entity_f1(counts) == pytest.approx(f1_score(expected, predicted, zero_division=0))


def test_f1_is_the_micro_average_over_rows() -> None:
    first = entity_counts(["B-PER", "I-PER", "O"], ["B-PER", "I-PER", "O"])
    second = entity_counts(["B-PER", "O", "S-LOC"], ["B-PER", "I-PER", "S-LOC"])
    assert (first, second) == ((1, 1, 1), (1, 2, 2))
    assert entity_f1(np.array([first, second], float)) == pytest.approx(2 * 2 / (3 + 3))
    assert entity_f1(np.zeros((2, 3))) == 0.0


def test_tags_of_entities_have_a_prefix() -> None:
    assert all(is_entity_tag(tag) for tag in (*TAGS, "B", "S"))
    assert not any(is_entity_tag(tag) for tag in ("NN", "OTHER", "O-PER", "L-PER", "LABEL_0", "b-PER", ""))
