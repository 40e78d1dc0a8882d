"""Question answering: predict the span of a context that answers a question.

Contexts are read in windows. The metrics are those of SQuAD (Rajpurkar et al. 2016).
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from datasets import Dataset

from compressor.answers import LABELS, SPAN_ENDS
from compressor.config.sections import RowsConfig
from compressor.errors import RowError
from compressor.model_folder import ModelFolder
from compressor.results import Note, NoteCode
from compressor.tasks.base import Batch, Forward, Task
from compressor.tasks.columns import LabelColumn, TextColumns
from compressor.tasks.encoding import TextTokenizer, encode_chunks, group_means, pad, require_fast_tokenizer
from compressor.tasks.metrics import Metric, column_mean, share

_LEAST_TOKENS = 4  # minimum room of a window for the tokens of question and context
_LONGEST_QUESTION = 64  # maximum tokens of a question, as in BERT (Devlin et al. 2019)
_NO_WINDOW = -100  # padding of `spans` of questions with fewer windows than others in the batch
_NO_SPAN = (0, 0)  # label of a window that does not contain the whole answer
LONGEST_ANSWER = 30
"""Maximum tokens of a predicted answer, as is usual for SQuAD."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FORMS = '[{"text": "...", "start": 0}] or {"text": ["..."], "answer_start": [0]}'


class QuestionAnswering(Task):
    """Spans of a context by the logits of their first and last tokens, scored by SQuAD's F1 and exact match.

    A row is a question. If question and context do not fit in a window of the maximum length, the context is read in
    windows that share `stride` tokens of the request; a forward runs a batch of windows. The model is trained on the
    first answer of a row. The span with the largest logits in any window is compared with all answers.

    Raises:
        InputError: the tokenizer does not report the characters of a token, or a window has no room for both texts.
    """

    name = "question-answering"
    metrics: ClassVar[tuple[Metric, ...]] = (
        share("f1", partial(column_mean, 0)),
        share("exact-match", partial(column_mean, 1)),
    )
    outputs = SPAN_ENDS
    label_name = "spans"  # transformers' Trainer would divide the loss by the number of `labels`
    text_columns: ClassVar[TextColumns] = TextColumns(
        usual=(("question", "context"), ("question", "passage"), ("question", "paragraph"), ("query", "context")),
        counts=(2,),
        description="question and context",
        example="question,context",
        allows_empty=False,
    )
    label_column: ClassVar[LabelColumn] = LabelColumn(usual=("answers", "answer"), description="answer")

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        require_fast_tokenizer(folder, "which characters a token is")
        self._request, self._tokenizer = request, folder.processor
        self._columns: tuple[str, ...] = request.text_columns
        self._answers = request.label_column
        self._texts = TextTokenizer(folder, request, texts=2, least=_LEAST_TOKENS)
        self._longest_question = min(_LONGEST_QUESTION, self._texts.room // 2)
        self._stride = min(request.stride, (self._texts.room - self._longest_question) // 2)
        self.questions: list[Question] = []
        """All encoded questions; the `number` of an example is an index."""

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Determine the columns of all splits, and note how they are read."""
        self._columns = self.text_columns.find(rows, self._request.text_columns, source)
        question, context = self._columns
        text = (
            f"each {question!r} is answered by a span of its {context!r} of at most {LONGEST_ANSWER} tokens; rows"
            f" longer than {self._texts.longest} tokens are read in windows that share {self._stride} tokens of the"
            f" {context!r}, and a {question!r} is truncated after {self._longest_question}"
        )
        self.notes = (Note(text=text, code=NoteCode.TEXT_COLUMNS),)
        self._answers = self.label_column.find(rows, self._request.label_column, source)

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode questions as windows.

        Columns: `input_ids`, the tokens of each window; `labels`, the positions of the answer in each window;
        `reference`, the accepted answers; `number`, the index in `questions`; `length`, the tokens of all windows.
        """
        _, context = self.text_columns.find(rows, self._columns, source)
        column = self.label_column.find(rows, self._answers, source)
        encoded, lost = self._encode(rows, _answers_of(rows, column, rows[context][:], source), source)
        if lost:
            text = (
                f"{source}: the answers to {lost} of {len(rows)} questions are in no single window, so no model can "
                f"give them; raise --max-length or --stride"
            )
            self.note(text, NoteCode.ANSWERS_CUT)
        return encoded

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode questions without answers; every label is (0, 0), as of an answer that lies in no window."""
        return self._encode(rows, [[]] * len(rows), source)[0]

    def _encode(self, rows: Dataset, answers: Sequence[Sequence[Answer]], source: str) -> tuple[Dataset, int]:
        """The encoded questions, and the number of them whose answers lie in no window."""
        question, context = self.text_columns.find(rows, self._columns, source)
        names = ("input_ids", *(("token_type_ids",) if self._texts.takes_types else ()))

        def encode_chunk(chunk: Dataset, start: int) -> tuple[dict[str, Any], int]:
            contexts, accepted = chunk[context][:], answers[start : start + len(chunk)]
            questions = chunk[question][:]
            offsets = self._tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)
            pairs, longest = zip(questions, offsets["offset_mapping"], strict=True), self._longest_question
            encoding: Any = self._texts(
                [text[: tokens[longest - 1][1]] if len(tokens) > longest else text for text, tokens in pairs],
                contexts,
                truncation="only_second",
                stride=self._stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            windows: list[list[Window]] = [[] for _ in contexts]
            columns: dict[str, list[Any]] = {name: [[] for _ in contexts] for name in names}
            for number, row in enumerate(encoding["overflow_to_sample_mapping"]):
                windows[row].append(Window.of(encoding, number))
                for name in names:
                    columns[name][row].append(encoding[name][number])
            for row, of_row in enumerate(windows, start + 1):
                if not all(len(window.characters) for window in of_row):
                    raise RowError.of(source, row, f"no token in its {context!r}; remove the row", column=context)
            first = len(self.questions)
            labels = [
                [window.token_span(of_answers[0]) if of_answers else _NO_SPAN for window in of_row]
                for of_row, of_answers in zip(windows, accepted, strict=True)
            ]
            reference = [[answer.text for answer in of_answers] for of_answers in accepted]
            self.questions += map(Question, contexts, map(tuple, reference), map(tuple, windows))
            return {
                **columns,
                "length": [sum(map(len, ids)) for ids in columns["input_ids"]],
                "labels": labels,
                "reference": reference,
                "number": list(range(first, len(self.questions))),
            }, sum(not any(map(any, spans)) for spans in labels)

        return encode_chunks(rows, encode_chunk)

    def size_limits(self, examples: Dataset) -> tuple[int, int]:
        """The most windows of a question, and the most tokens of a window."""
        windows = examples["input_ids"]
        lengths = (len(window) for row in windows for window in row)
        return max(map(len, windows), default=1), max(lengths, default=1)

    def answer_ids(self, logits: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The most likely first and last token of each window."""
        return logits.argmax(1)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Windows `[windows, longest]`, and `spans` `[questions, most windows, 3]`.

        The windows of a question are consecutive. A span holds the positions of an answer's first and last token, and
        the number of its question; -100 is padding.
        """
        ids, types = (
            [window for example in examples for window in example.get(name, ())]
            for name in ("input_ids", "token_type_ids")
        )
        spans = [[[*span, example["number"]] for span in example["labels"]] for example in examples]
        return {**self._texts.collate(ids, types), self.label_name: pad(spans, _NO_WINDOW)}

    def loss_inputs(self, batch: Batch) -> Batch:
        """The batch with `start_positions` and `end_positions` `[windows]` instead of `spans`."""
        spans = batch[self.label_name]
        positions = spans[spans[..., 2] != _NO_WINDOW]
        return {**self.model_inputs(batch), "start_positions": positions[:, 0], "end_positions": positions[:, 1]}

    def example_means(self, values: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The mean over the windows of each question, `[questions]`, from values `[windows]`."""
        return group_means(values, _window_counts(batch[self.label_name]))

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """F1 and exact match of each question, `[questions, 2]`, from logits `[windows, tokens, 2]`."""
        pairs = ((prediction.text, question.answers) for question, prediction in self._predictions(logits, labels))
        return np.array([(f1(*pair), exact_match(*pair)) for pair in pairs])

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        return [prediction.text for _, prediction in self._predictions(logits, labels)]

    def labels_by(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[Any]]:
        """The predicted span of each question, which becomes its only accepted answer."""
        columns: dict[str, list[Any]] = {LABELS: [], "reference": []}
        predictions = self._predictions(*self.logits_and_labels(forward, examples))
        for example, (question, answer) in zip(examples, predictions, strict=True):
            self.questions[example["number"]] = replace(question, answers=(answer.text,))
            columns[LABELS].append([window.token_span(answer) for window in question.windows])
            columns["reference"].append([answer.text])
        return columns

    def _predictions(self, logits: np.ndarray, labels: np.ndarray) -> Iterator[tuple[Question, Answer]]:
        counts = _window_counts(labels)
        for number, windows in zip(labels[:, 0, 2], np.split(logits, np.cumsum(counts)[:-1]), strict=True):
            question = self.questions[int(number)]
            yield question, question.predict(windows.astype(np.float64))


def _window_counts(spans: np.ndarray) -> np.ndarray:
    """The number of windows of each question, `[questions]`, from `spans`."""
    return np.asarray((spans[..., 2] != _NO_WINDOW).sum(1))


@dataclass(frozen=True)
class Window:
    """The tokens of the context in a window.

    Attributes:
        first: position in the window of the first of these tokens.
        characters: index in the context of the first character of each token, and after its last, `[tokens, 2]`.
    """

    first: int
    characters: np.ndarray

    @classmethod
    def of(cls, encoding: Any, number: int) -> Window:
        """The window with a number in an encoding, with offsets, of questions and contexts."""
        inside = np.flatnonzero([text == 1 for text in encoding.sequence_ids(number)])
        first = int(inside[0]) if len(inside) else 0
        characters = encoding["offset_mapping"][number][first : first + len(inside)]
        return cls(first, np.array(characters, np.int32).reshape(-1, 2))

    def token_span(self, answer: Answer) -> tuple[int, int]:
        """Positions of the first and the last token of an answer; (0, 0) unless the window contains all of it."""
        starts, ends = self.characters.T
        end = answer.start + len(answer.text)
        first = int(np.searchsorted(ends, answer.start, side="right"))
        last = int(np.searchsorted(starts, end, side="left")) - 1
        if starts[0] > answer.start or ends[-1] < end or first > last:
            return _NO_SPAN
        return self.first + first, self.first + last


@dataclass(frozen=True)
class Question:
    """A question: its context, its accepted answers, and the windows of the context in order."""

    context: str
    answers: tuple[str, ...]
    windows: tuple[Window, ...]

    def predict(self, logits: np.ndarray) -> Answer:
        """The best span in all windows, from logits `[windows, tokens, 2]`."""
        spans = []
        for window, scores in zip(self.windows, logits, strict=True):
            inside = scores[window.first : window.first + len(window.characters)]
            score, first, last = best_span(inside[:, 0], inside[:, 1])
            spans.append((score, window.characters[first, 0], window.characters[last, 1]))
        _, start, end = max(spans, key=lambda span: span[0])
        return Answer(self.context[start:end], int(start))


def best_span(start: np.ndarray, end: np.ndarray, longest: int = LONGEST_ANSWER) -> tuple[float, int, int]:
    """The largest `start[i] + end[j]` with `i <= j < i + longest`, and i and j; logits of first and last tokens."""
    padded = np.concatenate([end, np.full(longest - 1, -np.inf, end.dtype)])
    scores = start[:, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)
    first, offset = np.unravel_index(scores.argmax(), scores.shape)
    return float(scores[first, offset]), int(first), int(first + offset)


class Answer(NamedTuple):
    """A span of a context without surrounding spaces, and the index of its first character."""

    text: str
    start: int


def _answers_of(rows: Dataset, column: str, contexts: Sequence[str], source: str) -> list[list[Answer]]:
    """The answers of every row, each a span of its context; raise InputError for other cells.

    A cell is a list of `{"text", "start"}` (or `answer_start`), or `{"text": [...], "answer_start": [...]}` as in
    Hugging Face's SQuAD, or either as JSON text.
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
    """1 if the normalized prediction equals a normalized answer, else 0."""
    words = _words(prediction)
    return float(any(words == _words(answer) for answer in answers))


def f1(prediction: str, answers: Iterable[str]) -> float:
    """The largest F1 between the words of the prediction and those of an answer.

    If a text has no words, F1 is 1 if both have none, else 0 (as in SQuAD 2.0).
    """
    scores, predicted = [], _words(prediction)
    for expected in map(_words, answers):
        common = (Counter(predicted) & Counter(expected)).total()
        has_words = predicted and expected
        scores.append(2 * common / (len(predicted) + len(expected)) if has_words else float(predicted == expected))
    return max(scores)


def _words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _read_cell(cell: Any) -> Iterable[Answer]:
    if isinstance(cell, str):
        cell = json.loads(cell)
    if isinstance(cell, Mapping):
        pairs = list(zip(cell["text"], cell["answer_start"], strict=True))
    else:
        pairs = [(item["text"], item["answer_start"] if item.get("start") is None else item["start"]) for item in cell]
    for text, start in pairs:
        # Arrow stores a column as decimal numbers if a row has a decimal number.
        is_whole = start.is_integer() if isinstance(start, float) else isinstance(start, int)
        if not isinstance(text, str) or not is_whole:
            raise TypeError(f"{text!r} at {start!r}")
        yield Answer(text, int(start))
