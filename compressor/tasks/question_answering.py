"""A question about a text, and the stretch of the text that answers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.errors import InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import takes_segments, token_limit
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import DataRequest, Task
from compressor.tasks.columns import answers_column, question_columns
from compressor.tasks.squad import Answer, answers_of, exact_match, f1

LONGEST = 30
"""Tokens of a predicted answer, at most, as is usual for SQuAD."""
_QUESTION = 64
"""Tokens of a question that are read, as in BERT (Devlin et al. 2019)."""
_NONE = -100


@dataclass(frozen=True)
class Window:
    """The context's tokens in one window.

    Attributes:
        first: the place of the first of them in the window.
        characters: where each begins and ends in the context, `[tokens, 2]`.
    """

    first: int
    characters: np.ndarray

    def tokens(self, answer: Answer) -> tuple[int, int]:
        """The places of the first and the last token of an answer; of the window's first where it is not all here."""
        begins, ends = self.characters.T
        end = answer.start + len(answer.text)
        one = int(np.searchsorted(ends, answer.start, side="right"))
        last = int(np.searchsorted(begins, end, side="left")) - 1
        if begins[0] > answer.start or ends[-1] < end or one > last:
            return 0, 0
        return self.first + one, self.first + last


@dataclass(frozen=True)
class _Asked:
    """What the answer to one question is read from and compared with."""

    context: str
    answers: tuple[str, ...]
    windows: tuple[Window, ...]

    def predicted(self, logits: np.ndarray) -> str:
        """The best span of all windows, by logits `[windows, tokens, 2]`."""
        found = []
        for window, scores in zip(self.windows, logits, strict=True):
            inside = scores[window.first : window.first + len(window.characters)]
            score, one, last = best_span(inside[:, 0], inside[:, 1])
            found.append((score, window.characters[one, 0], window.characters[last, 1]))
        _, begin, end = max(found, key=lambda span: span[0])
        return self.context[begin:end]


def best_span(start: np.ndarray, end: np.ndarray, longest: int = LONGEST) -> tuple[float, int, int]:
    """The largest `start[i] + end[j]` with `i <= j < i + longest`, and i and j. All spans, so no n best are needed."""
    padded = np.concatenate([end, np.full(longest - 1, -np.inf, end.dtype)])
    scores = start[:, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)
    one, more = np.unravel_index(scores.argmax(), scores.shape)
    return float(scores[one, more]), int(one), int(one + more)


class QuestionAnswering(Task):
    """Answers that stand in a text, by the logits of their first and last token: SQuAD's F1 and exact match.

    A row is a question. Where it does not fit beside its context, the context is read in windows that overlap; one
    forward answers a batch of windows. The model learns the first answer of a row; the span that scores highest in any
    window is compared with all of them.

    Args:
        folder: its tokenizer makes the tokens.
        request: columns (question and context, and as the label the answers), the longest window, and what two share.
        metric: one of `metrics`.

    Raises:
        InputError: the tokenizer does not say which characters a token is, or a window leaves no room.
    """

    name = "question-answering"
    metrics: tuple[str, ...] = ("f1", "exact-match")
    higher_is_better = True
    outputs = ("start_logits", "end_logits")
    label_name = "spans"  # a Trainer would divide the loss by the number of `labels`

    def __init__(self, folder: ModelFolder, request: DataRequest, metric: str) -> None:
        tokenizer, model = folder.processor, folder.model
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(
                f"{folder.path}: its tokenizer ({type(tokenizer).__name__}) does not say where in the text a token"
                " stands; save the fast one there (tokenizer.json)"
            )
        self.metric = metric
        self._request, self._tokenizer = request, tokenizer
        limits = (request.max_length, token_limit(model), tokenizer.model_max_length)
        self._longest = int(min(limit for limit in limits if limit))
        room = self._longest - tokenizer.num_special_tokens_to_add(pair=True)
        if room < 4:
            raise InputError(
                f"{folder.path}: {self._longest} tokens a window leave no room for a question and its context; raise"
                " --max-length"
            )
        self._question = min(_QUESTION, room // 2)
        self._stride = min(request.stride, (room - self._question) // 2)
        self._segments = takes_segments(model, tokenizer)
        self._pad = folder.config.get_text_config().pad_token_id
        self._asked: list[_Asked] = []

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Fix the columns, and say how they are read."""
        self._columns = question_columns(rows, self._request.text_columns, source)
        self._answers = answers_column(rows, self._request.label_column, source)
        self.notes = (
            f"each {self._columns[0]!r} is answered by a stretch of its {self._columns[1]!r}, at most {LONGEST} tokens"
            f" of it; rows longer than {self._longest} tokens are read in windows that share {self._stride} tokens of"
            f" the {self._columns[1]!r}, and a {self._columns[0]!r} is cut after {self._question}",
        )

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Questions to their windows: `input_ids` a list of tokens a window, `labels` the answer's place in each."""
        question, context = question_columns(rows, self._columns, source)
        contexts = list(rows[context])
        answers = answers_of(rows, answers_column(rows, self._answers, source), contexts, source)
        with quiet_transformers():
            encoded = self._tokenizer(
                self._cut(list(rows[question])),
                contexts,
                truncation="only_second",
                max_length=self._longest,
                stride=self._stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
                return_token_type_ids=self._segments,
            )
        own: list[list[int]] = [[] for _ in contexts]
        for window, row in enumerate(encoded["overflow_to_sample_mapping"]):
            own[row].append(window)
        windows = list(_windows(encoded))
        for row, mine in enumerate(own):
            if not all(len(windows[window].characters) for window in mine):
                raise InputError(f"{source}: row {row + 1} has no token in its {context!r}; leave the row out")
        names = ("input_ids", *(("token_type_ids",) if self._segments else ()))
        columns: dict[str, list[Any]] = {name: [[encoded[name][at] for at in mine] for mine in own] for name in names}
        columns["length"] = [sum(map(len, ids)) for ids in columns["input_ids"]]
        columns["labels"] = [
            [windows[at].tokens(given[0]) for at in mine] for mine, given in zip(own, answers, strict=True)
        ]
        columns["reference"] = [[answer.text for answer in given] for given in answers]
        columns["number"] = list(range(len(self._asked), len(self._asked) + len(contexts)))
        for text, right, mine in zip(contexts, columns["reference"], own, strict=True):
            self._asked.append(_Asked(text, tuple(right), tuple(windows[at] for at in mine)))
        return Dataset.from_dict(columns)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`[windows, longest]`, a question's windows after each other, and `spans` `[questions, most windows, 3]`.

        A span is the place of an answer's first and last token and the question's number; -100 for no window.
        """
        fills = {"input_ids": max(0, self._pad or 0), "token_type_ids": self._tokenizer.pad_token_type_id}
        batch = {
            name: _padded([window for example in examples for window in example[name]], fill)
            for name, fill in fills.items()
            if name in examples[0]
        }
        lengths = [len(window) for example in examples for window in example["input_ids"]]
        batch["attention_mask"] = _padded([[1] * length for length in lengths], 0)
        spans = [[[*place, example["number"]] for place in example["labels"]] for example in examples]
        return {**batch, self.label_name: _padded(spans, _NONE)}

    def labelled(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`start_positions` and `end_positions` `[windows]` in the place of `spans`."""
        spans = batch[self.label_name]
        places = spans[spans[..., 2] != _NONE]
        rest = {name: value for name, value in batch.items() if name != self.label_name}
        return {**rest, "start_positions": places[:, 0], "end_positions": places[:, 1]}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """F1 and exact match of each question, from logits `[windows, tokens, 2]`."""
        counts = (labels[..., 2] != _NONE).sum(1)
        found = []
        for number, own in zip(labels[:, 0, 2], np.split(logits, np.cumsum(counts)[:-1]), strict=True):
            asked = self._asked[int(number)]
            said = asked.predicted(own.astype(np.float64))
            found.append((f1(said, asked.answers), exact_match(said, asked.answers)))
        return np.array(found)

    def score(self, statistics: np.ndarray) -> float:
        """The mean over questions."""
        return float(statistics[:, self.metrics.index(self.metric)].mean())

    def _cut(self, questions: list[str]) -> list[str]:
        """Questions without what is behind their last token that is read."""
        found = self._tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        most = self._question
        return [
            text if len(tokens) <= most else text[: tokens[most - 1][1]]
            for text, tokens in zip(questions, found, strict=True)
        ]


def _windows(encoded: Any) -> Iterator[Window]:
    """The context of each window, which is the second of its two texts."""
    for number, characters in enumerate(encoded["offset_mapping"]):
        inside = np.flatnonzero([text == 1 for text in encoded.sequence_ids(number)])
        first = int(inside[0]) if len(inside) else 0
        yield Window(first, np.array(characters[first : first + len(inside)], np.int32).reshape(-1, 2))


def _padded(rows: Sequence[Any], fill: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)
