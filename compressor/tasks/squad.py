"""Read the answers to questions in the forms of data sets; the metrics of SQuAD (Rajpurkar et al. 2016)."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset

from compressor.errors import RowError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FORMS = '[{"text": "...", "start": 0}] or {"text": ["..."], "answer_start": [0]}'


class Answer(NamedTuple):
    """A span of a context without surrounding spaces, and the index of its first character."""

    text: str
    start: int


def answers_of(rows: Dataset, column: str, contexts: Sequence[str], source: str) -> list[list[Answer]]:
    """The answers of every row, each a span of its context.

    A cell is a list of `{"text", "start"}` (or `answer_start`), or `{"text": [...], "answer_start": [...]}` as in
    Hugging Face's SQuAD, or either of them as JSON text.

    Args:
        rows: the rows.
        column: the column of answers.
        contexts: the context of each row.
        source: name of the rows in error messages.

    Raises:
        InputError: a row has no answer, answers are in another form, or an answer is not at its position.
    """
    answers = []
    for row, (cell, context) in enumerate(zip(rows[column][:], contexts, strict=True), 1):
        try:
            spans = list(_read_cell(cell))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{column!r} does not hold answers; write {_FORMS}"
            raise RowError.of(source, row, problem, column=column, value=cell) from error
        if not spans:
            raise RowError.of(source, row, "no answer; remove questions without answers", column=column)
        for span in spans:
            text = context[max(0, span.start) :][: len(span.text)]
            if span.start < 0 or text != span.text or not span.text.strip():
                problem = (
                    f"the answer {span.text[:40]!r} is not at character {span.start} of its context, which has"
                    f" {text[:40]!r} there; correct its start or remove the row"
                )
                raise RowError.of(source, row, problem, column=column, value=span.text, start=span.start)
        answers.append([Answer(text.strip(), start + len(text) - len(text.lstrip())) for text, start in spans])
    return answers


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1 if the normalized prediction equals one of the normalized answers, else 0."""
    words = _words(prediction)
    return float(any(words == _words(answer) for answer in answers))


def f1(prediction: str, answers: Iterable[str]) -> float:
    """The largest F1 between the words of the prediction and those of an answer.

    If either text has no words, F1 is 1 if both have none, else 0 (as in SQuAD 2.0).
    """
    return max(_f1(_words(prediction), _words(answer)) for answer in answers)


def _f1(predicted: list[str], expected: list[str]) -> float:
    """F1 between two lists of words."""
    if not predicted or not expected:
        return float(predicted == expected)
    return 2 * (Counter(predicted) & Counter(expected)).total() / (len(predicted) + len(expected))


def _words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _read_cell(cell: Any) -> Iterable[Answer]:
    """The answers in a cell, in any of the forms that `answers_of` describes."""
    if isinstance(cell, str):
        cell = json.loads(cell)
    if isinstance(cell, Mapping):
        pairs = list(zip(cell["text"], cell["answer_start"], strict=True))
    else:
        pairs = [(item["text"], item["answer_start"] if item.get("start") is None else item["start"]) for item in cell]
    for text, start in pairs:
        # A column is stored as decimal numbers if one of its rows has one.
        is_whole = start.is_integer() if isinstance(start, float) else isinstance(start, int)
        if not isinstance(text, str) or not is_whole:
            raise TypeError(f"{text!r} at {start!r}")
        yield Answer(text, int(start))
