"""The answers to a question: how data sets write them, and how SQuAD compares with them (Rajpurkar et al. 2016)."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset

from compressor.errors import InputError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FORMS = '[{"text": "...", "start": 0}] or {"text": ["..."], "answer_start": [0]}'


class Answer(NamedTuple):
    """A stretch of a context, without the spaces around it, and the character that it starts at."""

    text: str
    start: int


def answers_of(rows: Dataset, column: str, contexts: Sequence[str], source: str) -> list[list[Answer]]:
    """The answers of every row, each as it stands in its context.

    A cell is a list of `{"text", "start"}` (or `answer_start`), or `{"text": [...], "answer_start": [...]}` as in
    Hugging Face's SQuAD, or either as JSON text.

    Raises:
        InputError: a row has none, they are written otherwise, or one does not stand in the context where it says.
    """
    found = []
    for number, (value, context) in enumerate(zip(rows[column], contexts, strict=True), 1):
        try:
            given = list(_read(value))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{source}: row {number}: {column!r} does not hold answers; write {_FORMS}") from error
        if not given:
            raise InputError(f"{source}: row {number} has no answer; leave out the questions that have none")
        for answer in given:
            there = context[max(0, answer.start) :][: len(answer.text)]
            if answer.start < 0 or there != answer.text or not answer.text.strip():
                raise InputError(
                    f"{source}: row {number}: the answer {answer.text[:40]!r} does not stand at character"
                    f" {answer.start} of its context ({there[:40]!r} does); mend its start or leave the row out"
                )
        found.append([Answer(text.strip(), start + len(text) - len(text.lstrip())) for text, start in given])
    return found


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1 if the normalized prediction is one of the normalized answers, else 0."""
    said = _words(prediction)
    return float(any(said == _words(answer) for answer in answers))


def f1(prediction: str, answers: Iterable[str]) -> float:
    """The largest F1 of the words of the prediction and an answer's.

    Of two texts without words (SQuAD 2.0's rule) 1 if neither has any, else 0.
    """
    return max(_f1(_words(prediction), _words(answer)) for answer in answers)


def _f1(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    return 2 * (Counter(said) & Counter(right)).total() / (len(said) + len(right))


def _words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _read(value: Any) -> Iterable[Answer]:
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, Mapping):
        pairs = list(zip(value["text"], value["answer_start"], strict=True))
    else:
        pairs = [(one["text"], one["answer_start"] if one.get("start") is None else one["start"]) for one in value]
    for text, start in pairs:
        if not isinstance(text, str) or not isinstance(start, int):
            raise TypeError(f"{text!r} at {start!r}")
        yield Answer(text, start)
