"""Regression: predict a number, or several, from one or two texts; and reranking: order documents by a score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from datasets import Dataset

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder.tokenizer_file import Encodings
from compressor.results import NoteCode
from compressor.silence_libraries import one_line, quiet_transformers
from compressor.tasks.base import Batch, Task, Vocabulary
from compressor.tasks.columns import TextColumns
from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.labels import number_lists, numbers_by_column, numbers_of
from compressor.tasks.metrics import PEARSON, SPEARMAN, Metric, column_mean, share
from compressor.tasks.sentence_similarity import TOP, SentenceSimilarity

if TYPE_CHECKING:
    from compressor.model_folder import ModelFolder
    from compressor.models.pooled_encoder import Answers

_NDCG = share("ndcg@10", partial(column_mean, 0))
_MRR = share("mrr@10", partial(column_mean, 1))
_QUERY_COLUMNS = ("query_id", "query-id", "qid", "group", "group_id")
"""Usual names of columns that identify the query of a row; without them, equal first texts do."""
_GROUPED_SHARE = 0.5
"""Minimum share of rows whose query has documents of different relevance, for a metric of each query."""
_FILLERS = ("0", "1 2 3 4")  # texts that differ in their last token; see `_PairTemplate.suffix`


class Regression(LabelledTexts):
    """Regression by the logits of the model, scored by their correlation with labels.

    A model with several outputs predicts as many numbers. A label is then a list of numbers, or there is a column for
    each (`label_lists`), and the metric is the mean over the numbers.
    """

    name = "regression"
    metrics: ClassVar[tuple[Metric, ...]] = (SPEARMAN, PEARSON)
    label_type = np.float32
    may_have_columns = True

    @property
    def placeholder(self) -> Any:
        return 0 if self._numbers == 1 else [0.0] * self._numbers

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Raise InputError unless labels are different numbers, as a correlation requires."""
        column = self._find_labels(rows, source)
        columns = self._columns(rows, source)
        if (constant := _constant_of(self.encode_labels(rows, column, source))) is not None:
            name, value = columns[constant[0]] if columns else column, constant[1]
            text = f"{source}: every row has the label {value:g}; give rows with different values of {name!r}"
            raise InputError(text, code=ErrorCode.INVALID_ROWS, column=name, value=value)

    def metric_obstacle(self, examples: Dataset) -> str | None:
        constant = _constant_of(examples["labels"][:])
        return None if constant is None else f"every row has the label {constant[1]:g}"

    def constant_score(self, statistics: np.ndarray) -> float | None:
        predicted, labels = np.split(statistics, 2, axis=1)
        return self.score(np.concatenate([np.zeros_like(predicted), labels], axis=1))

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[Any]:
        """The number of every row, or a list of numbers."""
        columns = self._columns(rows, source)
        if columns is not None:
            numbers = numbers_by_column(rows, columns, source)
            return numbers if self._numbers > 1 else [number for (number,) in numbers]
        if self._numbers == 1:
            return numbers_of(rows, column, source)
        return number_lists(rows, column, self.config, source)

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Predicted and true numbers of each example, `[batch, 2 numbers]`, from logits `[batch, numbers]`."""
        return np.concatenate([values.reshape(len(labels), -1) for values in (logits, labels)], 1, dtype=np.float64)

    def labels_of(self, logits: np.ndarray, examples: Sequence[Mapping[str, Any]]) -> list[Any]:
        numbers: list[list[float]] = logits.reshape(len(examples), -1).astype(np.float64).tolist()
        return numbers if isinstance(self.placeholder, list) else [values[0] for values in numbers]

    def score(self, statistics: np.ndarray) -> float:
        """The mean of the metric over the numbers of an example."""
        predicted, labels = np.split(statistics, 2, axis=1)
        pairs = zip(predicted.T, labels.T, strict=True)
        return float(np.mean([super(Regression, self).score(np.stack(pair, axis=-1)) for pair in pairs]))

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> Sequence[str]:
        return [_text_of(numbers) for numbers in logits.reshape(len(labels), -1).tolist()]

    def reference_text(self, example: Mapping[str, Any]) -> str:
        return _text_of(np.atleast_1d(example["labels"]).tolist())

    @property
    def _numbers(self) -> int:
        return int(self.config.num_labels or 1)


def _constant_of(labels: Sequence[Any]) -> tuple[int, float] | None:
    """The first number of the labels that is the same in every example, its index and its value; None: all vary."""
    table = np.asarray(labels, np.float64).reshape(len(labels), -1)
    constant = np.flatnonzero((table == table[:1]).all(0))
    return (int(constant[0]), float(table[0, constant[0]])) if len(constant) else None


def _text_of(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


class Reranking(Regression):
    """Scores of texts or pairs, evaluated by their correlation with labels, or by the order of a query's documents.

    Rows with the same first text, or the same value of a column such as `query_id`, are documents of a query. Their
    labels are relevances, above zero for relevant documents. If the relevances of most queries differ, the metric is
    nDCG@10 unless the recipe names another.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (*Regression.metrics, _NDCG, _MRR)
    label_name = "pairs"
    text_columns: ClassVar[TextColumns] = TextColumns(
        usual=tuple(dict.fromkeys((*SentenceSimilarity.text_columns.usual, *TextColumns().usual)))
    )

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        self._folder = folder
        self._queries: dict[str, int] = {}
        self._template: _PairTemplate | None = None
        answers = getattr(folder.model, "answers", None)
        if answers is not None and getattr(folder.processor, "chat_template", None):
            self._template = _PairTemplate(folder.processor, answers, folder.path)
            self._texts.takes_types = False
        self._set_metric(metric)

    @classmethod
    def accepts(cls, folder: ModelFolder) -> bool:
        return bool(folder.config.num_labels == 1)

    @property
    def ranks(self) -> bool:
        """Whether the metric depends on the order of the documents of each query."""
        return self._metric in (_NDCG, _MRR)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokens of texts; None for pairs in a chat template, whose texts cannot be cut."""
        return super().vocabulary if self._template is None else None

    @property
    def chooser(self) -> Task:
        """A task with the metric Spearman: an order needs all documents of a query."""
        if not self.ranks:
            return self
        metric = Regression.metrics[0]
        return Reranking(self._folder, self._request.model_copy(update={"metric": metric.name}), metric)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Check that labels differ, and choose the metric if the recipe names none."""
        super().learn_labels(rows, source)
        queries = self._queries_of(rows, source)
        labels = self.encode_labels(rows, self._find_labels(rows, source), source)
        of_query: dict[int, set[float]] = {}
        for query, label in zip(queries, labels, strict=True):
            of_query.setdefault(query, set()).add(label)
        grouped = sum(len(of_query[query]) > 1 for query in queries)
        if self._request.metric is None and queries and grouped / len(queries) >= _GROUPED_SHARE:
            self._set_metric(_NDCG)
            text = (
                f"{source}: its {len(set(queries))} queries have several documents each, so the metric is the"
                f" {_NDCG.name} of the documents of each query (--metric spearman correlates scores and labels)"
            )
            self.note(text, NoteCode.METRIC_CHOSEN)

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """A correlation needs different labels; an order needs a relevant document."""
        if not self.ranks:
            return super().metric_obstacle(examples)
        return None if max(examples["labels"][:], default=0) > 0 else "no document is relevant to any query"

    def encode_with(self, rows: Dataset, labels: Iterable[Any], source: str) -> Dataset:
        """Encode texts as tokens, with these labels and the number of the `query`."""
        return super().encode_with(rows, labels, source).add_column("query", self._queries_of(rows, source))

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """The batch of `LabelledTexts.collate`, with `pairs` `[batch, 2]` of label and query instead of labels."""
        batch = super().collate(examples)
        queries = np.array([example["query"] for example in examples], np.float64)
        return {**batch, self.label_name: np.stack([batch.pop("labels"), queries], axis=-1, dtype=np.float64)}

    def loss_inputs(self, batch: Batch) -> Batch:
        """The batch with `labels` `[examples]` instead of `pairs`."""
        return {**self.model_inputs(batch), "labels": batch[self.label_name][:, 0].astype(np.float32)}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Score and label of each example, `[batch, 2]`; with its query, `[batch, 3]`, if the order is scored."""
        parts = [logits.reshape(len(labels), -1)[:, :1], labels if self.ranks else labels[:, :1]]
        return np.concatenate(parts, axis=1, dtype=np.float64)

    def summarize(self, statistics: np.ndarray) -> np.ndarray:
        return query_scores(statistics) if self.ranks else statistics

    def score(self, statistics: np.ndarray) -> float:
        return self._metric.value(statistics) if self.ranks else super().score(statistics)

    def constant_score(self, statistics: np.ndarray) -> float | None:
        return None if self.ranks else super().constant_score(statistics)

    def _tokenize(self, texts: Sequence[list[str]]) -> tuple[Encodings, int]:
        """The tokens of rows of one or two texts, or of pairs in the chat template of a language model."""
        if self._template is None:
            return super()._tokenize(texts)
        queries, documents = texts if len(texts) == 2 else ([""] * len(texts[0]), texts[0])
        rows, cut = self._template.encode(queries, documents, self._texts.longest)
        return Encodings({"input_ids": rows, "attention_mask": [[1] * len(ids) for ids in rows]}), cut

    def _set_metric(self, metric: Metric) -> None:
        self._metric = metric
        self.set_aside_by = "query" if self.ranks else None

    def _queries_of(self, rows: Dataset, source: str) -> list[int]:
        """The number of the query of every row, the same in all splits; single texts without a column differ."""
        name = next((name for name in _QUERY_COLUMNS if name in rows.column_names), None)
        texts = self.text_columns.find(rows, self._request.text_columns, source)
        if name is None and len(texts) == 1:
            queries = [f"{source}, row {number}" for number in range(len(rows))]
        else:
            queries = [str(query) for query in rows[name or texts[0]][:]]
        return [self._queries.setdefault(query, len(self._queries)) for query in queries]


def query_scores(statistics: np.ndarray) -> np.ndarray:
    """nDCG@10 and reciprocal rank@10 of each query with a relevant document, `[queries, 2]`.

    The gain of a document is its label, discounted by log2(1 + rank), and the sum is divided by that of the best order
    (Järvelin and Kekäläinen 2002). The reciprocal rank is that of the first document with a label above zero, or zero
    if it is not among the first ten. Documents with equal scores are sorted from the least relevant, so that the order
    of rows has no influence. Statistics are score, label and number of the query of each example, `[examples, 3]`.
    """
    scores, labels, queries = statistics.T
    gains = np.maximum(labels, 0)
    order = np.lexsort((gains, -scores, queries))
    starts = np.flatnonzero(np.diff(queries[order], prepend=np.nan) != 0)
    values = []
    for documents in filter(np.any, np.split(gains[order], starts[1:])):
        top, best = documents[:TOP], np.sort(documents)[::-1][:TOP]
        discounts = 1 / np.log2(np.arange(2, len(top) + 2))
        first = int(np.argmax(documents > 0)) + 1
        values.append((top @ discounts / (best @ discounts), 1 / first if first <= TOP else 0.0))
    return np.array(values).reshape(-1, 2)


class _PairTemplate:
    """The chat template of a tokenizer with the roles `query` and `document`, as sentence-transformers uses it.

    It raises InputError if the template fails, or lacks the query or the document.
    """

    def __init__(self, tokenizer: Any, answers: Answers, path: Any) -> None:
        self._tokenizer, self._answers = tokenizer, answers
        self._is_structured = False
        if (problem := self._problem()) is None:
            return
        self._is_structured = True
        if self._problem() is not None:
            text = (
                f"{path}: the chat template cannot hold a query and a document ({problem}); save a template with these "
                f"roles in chat_template.jinja"
            )
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=path, field="chat_template")

    @cached_property
    def suffix(self) -> list[int]:
        """The tokens after the content, which truncation keeps because the score is computed at the last token."""
        first, second = (self._ids(text, text) for text in _FILLERS)
        pairs = zip(reversed(first), reversed(second), strict=False)
        count = next((count for count, (left, right) in enumerate(pairs) if left != right), 0)
        return first[len(first) - count :]

    def encode(self, queries: Sequence[str], documents: Sequence[str], longest: int) -> tuple[list[list[int]], int]:
        """The tokens of each pair, at most `longest`, and the number of truncated pairs."""
        rows = [self._ids(query, document) for query, document in zip(queries, documents, strict=True)]
        suffix = self.suffix[-longest:]
        cut = [[*ids[: longest - len(suffix)], *suffix] if len(ids) > longest else ids for ids in rows]
        return cut, sum(len(ids) > longest for ids in rows)

    def _ids(self, query: str, document: str) -> list[int]:
        text = self._render(query, document)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render(self, query: str, document: str) -> str:
        contents = {"system": self._answers.prompt, "query": query, "document": document}
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self._is_structured else text}
            for role, text in contents.items()
            if text or role != "system"
        ]
        with quiet_transformers():
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **self._answers.template))

    def _problem(self) -> str | None:
        query, document = "a query of a pair", "the document of a pair"
        try:
            text = self._render(query, document)
        except Exception as error:  # a template is a program of the folder
            return one_line(error)
        missing = [name for name, part in (("query", query), ("document", document)) if part not in text]
        return f"the template leaves out the {missing[0]}" if missing else None
