"""Windows lose nothing of a context, and the best span of all of them is the prediction."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.tasks.question_windows import best_span
from compressor.tasks.squad import Answer
from tests.tasks.questions import CONTEXTS, WORDS, byte_pieces, encode, row, task_of, wordpieces

TASKS = {make: task_of(make()) for make in (wordpieces, byte_pieces)}


@pytest.mark.parametrize("tokenizer", TASKS)
@settings(max_examples=40, deadline=None)
@given(CONTEXTS, st.text("ab ", min_size=1, max_size=40).filter(str.strip))
def test_windows_lose_nothing_of_a_context(tokenizer: Any, context: str, question: str) -> None:
    task = TASKS[tokenizer]
    example = encode(task, row(context, question))[0]
    windows = task.questions[example["number"]].windows
    covered = np.zeros(len(context), bool)
    for window in windows:
        for start, end in window.characters:
            covered[start:end] = True
    assert all(in_window or letter.isspace() for letter, in_window in zip(context, covered, strict=True))
    assert all(len(ids) <= 24 for ids in example["input_ids"])
    for window, following in itertools.pairwise(windows):
        assert np.array_equal(window.characters[-5:], following.characters[:5])


@pytest.mark.parametrize("tokenizer", TASKS)
@settings(max_examples=40, deadline=None)
@given(CONTEXTS, st.data())
def test_the_tokens_of_an_answer_give_its_text(tokenizer: Any, context: str, draw: st.DataObject) -> None:
    """This holds in every window with the whole answer; in other windows the label is the first token."""
    words = context.split(" ")
    first = draw.draw(st.integers(0, len(words) - 1))
    last = draw.draw(st.integers(first, min(first + 2, len(words) - 1)))
    answer = " ".join(words[first : last + 1])
    start = len(" ".join(words[:first])) + (first > 0)
    task = TASKS[tokenizer]
    example = encode(task, row(context, "who", Answer(answer, start)))[0]
    for window, (begin, end) in zip(task.questions[example["number"]].windows, example["labels"], strict=True):
        inside = window.characters[0, 0] <= start and window.characters[-1, 1] >= start + len(answer)
        assert (begin, end) == (0, 0) or inside
        if inside:
            span = window.characters[begin - window.first][0], window.characters[end - window.first][1]
            assert context[slice(*span)].strip() == answer


@given(st.lists(st.tuples(*(st.integers(-4, 4),) * 2), min_size=1, max_size=12), st.integers(1, 5))
def test_the_best_span_is_the_best_of_all(logits: list[tuple[int, int]], longest: int) -> None:
    start, end = np.array(logits, float).T
    spans = [(i, j) for i in range(len(logits)) for j in range(i, min(i + longest, len(logits)))]
    score, first, last = best_span(start, end, longest)
    assert (first, last) in spans
    assert score == start[first] + end[last] == max(start[i] + end[j] for i, j in spans)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 999))
def test_the_prediction_is_the_best_span_of_any_window(words: int, seed: int) -> None:
    """Compared with all windows and spans; neither question, special tokens nor padding can be predicted."""
    rng = np.random.default_rng(seed)
    task = TASKS[wordpieces]
    context = " ".join(f"{WORDS[rng.integers(len(WORDS))]}" for _ in range(words))
    question = task.questions[encode(task, row(context))[0]["number"]]
    logits = rng.normal(size=(len(question.windows), 24, 2))
    logits[:, :3] += 9
    spans = [
        (scores[window.first + i, 0] + scores[window.first + j, 1], characters[i, 0], characters[j, 1])
        for scores, window in zip(logits, question.windows, strict=True)
        for characters in [window.characters]
        for i in range(len(characters))
        for j in range(i, min(i + 30, len(characters)))
    ]
    _, begin, end = max(spans)
    assert question.predict(logits) == context[begin:end]
