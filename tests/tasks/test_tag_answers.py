"""Answers of token classification as text: entities, or the words whose tags differ."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from compressor.tasks.base import Forward
from compressor.tasks.token_labels import entities_of
from tests.tasks.questions import byte_pieces, wordpieces
from tests.tasks.tags import ROW, TAGS, encode, metaspace, task_of


@pytest.mark.parametrize("tokenizer", [wordpieces(), byte_pieces(), metaspace()], ids=["words", "bytes", "spaces"])
@settings(max_examples=15, deadline=None)
@given(words=st.lists(st.text("abexy", min_size=1, max_size=4), min_size=1, max_size=6), data=st.data())
def test_answers_have_the_words_of_entities(
    tokenizer: PreTrainedTokenizerFast, words: list[str], data: st.DataObject
) -> None:
    task = task_of(tokenizer, max_length=60)
    tags, predicted = (data.draw(st.lists(st.integers(0, 3), min_size=len(words), max_size=len(words))) for _ in "12")
    tags[0] = 1
    rows = list(encode(task, {"words": words, "tags": tags}, {"words": ["abe"], "tags": [1]}))
    assert task.reference_text(rows[0]) == spans(words, tags)
    assert list(task.answers(forward_to(rows, [predicted, [0]]), rows)) == [spans(words, predicted), "no entity"]


def forward_to(rows: list[dict[str, Any]], classes: list[list[int]]) -> Forward:
    """A model that predicts these classes at the first pieces of the words of rows, and class 3 elsewhere."""
    logits = np.eye(len(TAGS))[np.full((len(rows), max(row["length"] for row in rows)), 3)]
    for number, (row, words) in enumerate(zip(rows, classes, strict=True)):
        starts = [position for position, label in enumerate(row["labels"]) if label != -100]
        logits[number, starts] = np.eye(len(TAGS))[words]
    return lambda batch: logits


def spans(words: list[str], classes: list[int]) -> str:
    """The entities of a row as text, by `entities_of` and the words that went in."""
    entities = entities_of([TAGS[index] for index in classes])
    texts = [f"{' '.join(words[entity.start : entity.end])} ({entity.type})" for entity in entities]
    return "; ".join(texts) or "no entity"


def test_answers_of_accuracy_have_the_words_whose_tags_differ() -> None:
    task = task_of(metric="accuracy")
    rows = list(encode(task, ROW, ROW))
    first, second = task.answers(forward_to(rows, [[0, 3, 0], [0, 1, 2]]), rows)
    assert re.findall(r"(\w+) \((\S+) instead of (\S+)\)", first) == [("xy", "B-NUM", "B-LOC"), ("paris", "O", "I-LOC")]
    assert not {*ROW["words"], *TAGS} & set(re.findall(r"[\w-]+", second))
    assert task.reference_text(rows[0]) == ""
