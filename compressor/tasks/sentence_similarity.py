"""Sentence similarity: embed texts, and rank pairs by cosines, or retrieve the nearest documents of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from compressor.answers import EMBEDDING, LABELS, RANKING
from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.tasks.base import Batch, Forward, Task
from compressor.tasks.columns import LabelColumn, TextColumns, empty_text_notes
from compressor.tasks.encoding import TextTokenizer, count_cut, encode_chunks, group_means, require_tokens
from compressor.tasks.labels import numbers_of
from compressor.tasks.metrics import PEARSON, SPEARMAN, Metric, column_mean, share

TOP = 10
"""Number of documents that are retrieved for a query."""
_CHUNK_ROWS = 256  # queries that are compared with all documents at once

Gains = dict[int, float]
"""Index of a document -> its relevance to a query, above zero."""
_ABSENT = -1  # number of the second text of an example with a single text
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
"""Names of the prompts of queries and documents, as in the library's `encode_query` and `encode_document`."""
_RECALL = share("recall@10", partial(column_mean, 0))
_NDCG = share("ndcg@10", partial(column_mean, 1))
_COSINE = Metric("cosine", partial(column_mean, 0), maximum=1.0)
"""Of single texts without labels: the mean cosine of an embedding and that of the whole model."""


@dataclass(frozen=True, eq=False)
class Judgements:
    """Queries, documents and relevances of judged pairs.

    Attributes:
        queries: the index of a pair with each query that has a relevant document, `[queries]`.
        documents: the index of a pair with each distinct document, `[documents]`.
        gains: the relevant documents of each query, as indices of `documents`.
    """

    queries: np.ndarray
    documents: np.ndarray
    gains: tuple[Gains, ...]

    @classmethod
    def of(cls, pairs: np.ndarray) -> Judgements:
        """Judgements of pairs `[pairs, 3]`: relevance, number of the query, number of the document.

        Every document can be retrieved for every query. A document is not relevant to a query if their pair is missing,
        or if its relevance is at most zero.
        """
        relevance, numbers = pairs[:, 0], pairs[:, 1:].astype(np.int64)
        _, queries, query_of = np.unique(numbers[:, 0], return_index=True, return_inverse=True)
        _, documents, document_of = np.unique(numbers[:, 1], return_index=True, return_inverse=True)
        gains: list[Gains] = [{} for _ in queries]
        for gain, query, document in zip(relevance.tolist(), query_of.tolist(), document_of.tolist(), strict=True):
            if gain > 0:
                gains[query][document] = max(gain, gains[query].get(document, 0.0))
        judged = [query for query, relevant in enumerate(gains) if relevant]
        return cls(queries[judged], documents, tuple(gains[query] for query in judged))

    def scores(self, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """`ranking_scores` of the documents nearest to each query, `[queries, 2]`, from embeddings `[pairs, width]`."""
        return ranking_scores(nearest(queries[self.queries], documents[self.documents]), self.gains)


def nearest(queries: np.ndarray, documents: np.ndarray, count: int = TOP) -> np.ndarray:
    """Indices of the documents of largest cosine, `[queries, count]`, or fewer if there are fewer; the largest first.

    Embeddings are `[queries, width]` and `[documents, width]`.
    """
    count = min(count, len(documents))
    first, second = unit_rows(queries), unit_rows(documents).T
    chunks = [np.zeros((0, count), np.int64)]
    for start in range(0, len(first), _CHUNK_ROWS):
        cosines = first[start : start + _CHUNK_ROWS] @ second
        best = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(cosines, best, 1), axis=1, kind="stable")
        chunks.append(np.take_along_axis(best, order, 1))
    return np.concatenate(chunks)


def ranking_scores(retrieved: np.ndarray, gains: Sequence[Gains]) -> np.ndarray:
    """Recall and nDCG of each query, `[queries, 2]`.

    Recall is the share of all relevant documents that are retrieved; it stays below 1 if they are more than `count`.
    The gain of a document is discounted by log2(1 + rank), and the sum is divided by that of the best order (Järvelin
    and Kekäläinen 2002, with the relevance as gain, like trec_eval's ndcg_cut).

    Args:
        retrieved: indices of the retrieved documents, `[queries, count]`, the best first.
        gains: the relevant documents of each query, at least one document.
    """
    discounts = 1 / np.log2(np.arange(2, retrieved.shape[1] + 2))
    scores = np.zeros((len(retrieved), 2))
    for row, (documents, relevant) in enumerate(zip(retrieved.tolist(), gains, strict=True)):
        values = np.array([relevant.get(document, 0.0) for document in documents])
        best = np.sort(list(relevant.values()))[::-1][: len(discounts)]
        scores[row] = (values > 0).sum() / len(relevant), values @ discounts / (best @ discounts[: len(best)])
    return scores


def unit_rows(embeddings: np.ndarray) -> np.ndarray:
    """Embeddings of norm one, float32; zero vectors stay zero."""
    embeddings = embeddings.astype(np.float32)
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def cosines_of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The cosine of each pair of embeddings, `[pairs]` float64, from `[pairs, width]` each."""
    return np.asarray((unit_rows(first) * unit_rows(second)).sum(1, dtype=np.float64))


class SentenceSimilarity(Task):
    """Embeddings of texts, scored by the correlation of cosines with labels, or by retrieval.

    A row holds two texts and a number: how similar both are, or how relevant the second is to the first. For retrieval,
    the documents are the second texts of all rows. Rows without labels may hold a single text, of which the embedding
    of the whole model is the label: the metric is then the mean cosine with it.

    Raises:
        InputError: the model has no pooling, or the maximum length leaves no room for text.
    """

    name = "sentence-similarity"
    metrics: ClassVar[tuple[Metric, ...]] = (SPEARMAN, PEARSON, _RECALL, _NDCG)
    outputs = (EMBEDDING,)
    embeds = True
    label_name = "pairs"  # transformers' Trainer would divide the loss by the number of `labels`
    text_columns: ClassVar[TextColumns] = TextColumns(
        usual=(
            ("sentence1", "sentence2"),
            ("query", "passage"),
            ("query", "document"),
            ("query", "positive"),
            ("anchor", "positive"),
            ("question", "answer"),
            *TextColumns().usual,
        ),
        example="sentence1,sentence2",
    )
    pair_columns: ClassVar[TextColumns] = TextColumns(
        usual=tuple(names for names in text_columns.usual if len(names) == 2),
        counts=(2,),
        description="two columns of text",
        example="sentence1,sentence2",
    )
    label_column: ClassVar[LabelColumn] = LabelColumn(
        usual=("label", "labels", "score", "similarity", "similarity_score", "relevance", "relevances"),
        description="score",
    )

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(metric)
        model: Any = folder.model
        if folder.sentence is None or not hasattr(model, "pool"):
            text = f"{folder.path}: the model has no pooling (modules.json); save it with sentence-transformers"
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=folder.path)
        self._folder, self._request = folder, request
        self._model, self._sentence = model, folder.sentence
        self._texts = TextTokenizer(folder, request)
        self._numbers: dict[str, int] = {}
        self.set_aside_by = "query" if self.retrieves else None

    @property
    def retrieves(self) -> bool:
        return self._metric in (_RECALL, _NDCG)

    @property
    def chooser(self) -> Task:
        """A task with the metric Spearman: retrieval needs all examples at once."""
        return SentenceSimilarity(self._folder, self._request, SPEARMAN) if self.retrieves else self

    @property
    def loss_outputs(self) -> tuple[str, ...]:
        """The embedding, or the scores of documents if the model has some; see `SentenceEncoder.documents`."""
        return (EMBEDDING,) if self._model.documents is None else (RANKING,)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Check that labels differ, as a correlation requires, or that a document is relevant, as retrieval does.

        Raises:
            InputError: a label is not a number, or labels do not suit the metric.
        """
        column = self.label_column.find(rows, self._request.label_column, source)
        numbers = numbers_of(rows, column, source)
        if max(numbers) <= 0 if self.retrieves else min(numbers) == max(numbers):
            wanted = "above zero for the relevant pairs" if self.retrieves else "that differ"
            text = f"{source}: every row has the label {numbers[0]:g}; give rows with values of {column!r} {wanted}"
            raise InputError(text, code=ErrorCode.INVALID_ROWS, column=column, value=numbers[0])

    def agreement_on(self, examples: Dataset) -> Task:
        """The task whose metric is the mean cosine with the embeddings of single texts, else that of the pairs."""
        task = super().agreement_on(examples)
        if EMBEDDING in examples.column_names:
            task._metric = _COSINE
        return task

    def metric_obstacle(self, examples: Dataset) -> str | None:
        if self._metric == _COSINE:
            return None
        labels = examples["labels"][:]
        if self.retrieves:
            return None if max(labels) > 0 else "no document is relevant to any query"
        return None if min(labels) < max(labels) else f"every pair has the label {labels[0]:g}"

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode pairs of texts.

        Columns: `input_ids`, the tokens of each text; `numbers`, which identify the texts; `query`, the number of the
        first text; `labels`; `length`, the tokens of the longest text.
        """
        names = self.pair_columns.find(rows, self._request.text_columns, source)
        column = self.label_column.find(rows, self._request.label_column, source)
        return self._encode_texts(rows, names, numbers_of(rows, column, source), source)

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode pairs of texts, or single texts; every label is zero."""
        names = self.text_columns.find(rows, self._request.text_columns, source)
        return self._encode_texts(rows, names, [0.0] * len(rows), source)

    def size_limits(self, examples: Dataset) -> tuple[int, int]:
        return max(map(len, examples["input_ids"][:]), default=1), max(examples["length"][:], default=1)

    def input_counts(self, rows: Dataset) -> tuple[int, int]:
        texts = [ids for row in rows["input_ids"][:] for ids in row]
        return len(texts), sum(map(len, texts))

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Texts `[texts, longest]`, padded on the right, and `pairs` `[examples, 3]` or `[examples, 3 + width]`.

        The texts of an example are consecutive. A pair holds the label and the numbers of both texts, float64; -1 for a
        missing second text; and the embedding of the whole model if it is the label.
        """
        batch = self._texts.collate([ids for example in examples for ids in example["input_ids"]])
        pairs = [
            (example["labels"], *(*example["numbers"], _ABSENT)[:2], *example.get(EMBEDDING, ()))
            for example in examples
        ]
        return {**batch, self.label_name: np.array(pairs, np.float64)}

    def loss_inputs(self, batch: Batch) -> Batch:
        return {**self.model_inputs(batch), "labels": batch[self.label_name][:, 0].astype(np.float32)}

    def example_means(self, values: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The mean over the texts of each example, `[examples]`, from values `[texts]`."""
        return group_means(values, _text_counts(batch[self.label_name]))

    def scored_outputs(self, outputs: Mapping[str, Any], batch: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """The outputs with embeddings, which are pooled here if the graph does not pool."""
        name = self._model.states_output
        if EMBEDDING in outputs or name not in outputs:
            return outputs
        return {**outputs, EMBEDDING: self._model.pool(np.asarray(outputs[name]), batch["attention_mask"])}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Cosine and label of each example, `[examples, 2]`, from embeddings `[texts, width]`.

        For retrieval, the pair and the embeddings of its texts, `[examples, 3 + 2 width]`; for single texts, the cosine
        with the embedding that is the label, `[examples, 1]`.
        """
        first, second = pair_embeddings(logits, labels)
        if self._metric == _COSINE:
            return cosines_of(first, labels[:, 3:])[:, None]
        if self.retrieves:
            return np.concatenate([labels, first, second], axis=1, dtype=np.float64)
        return np.stack([cosines_of(first, second), labels[:, 0]], axis=-1)

    def labels_by(self, forward: Forward, examples: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[Any]] | None:
        """The cosine of each pair, or the embedding of each text; None for retrieval, which compares all texts."""
        if self.retrieves:
            return None
        embeddings, labels = self.logits_and_labels(forward, examples)
        if (labels[:, 2] == _ABSENT).all():
            return {EMBEDDING: embeddings.astype(np.float32).tolist()}
        return {LABELS: cosines_of(*pair_embeddings(embeddings, labels)).tolist()}

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The label of a pair; empty for a single text."""
        return f"{example['labels']:.4g}" if len(example["input_ids"]) == 2 else ""

    def summarize(self, statistics: np.ndarray) -> np.ndarray:
        """For retrieval, recall and nDCG of each query, `[queries, 2]`, from pairs and embeddings of all examples."""
        if not self.retrieves:
            return statistics
        pairs, embeddings = np.split(statistics, [3], axis=1)
        return Judgements.of(pairs).scores(*np.split(embeddings, 2, axis=1))

    def _encode_texts(self, rows: Dataset, names: Sequence[str], labels: Sequence[float], source: str) -> Dataset:

        def encode(chunk: Dataset, start: int) -> tuple[dict[str, Any], int]:
            texts = [list(chunk[name]) for name in names]
            # For retrieval, texts have the prompt of queries or of documents.
            prompts = (_QUERY, _DOCUMENT) if self.retrieves else ((), ())
            encodings = [
                self._texts([self._sentence.prepare(text, *prompt) for text in column])
                for column, prompt in zip(texts, prompts, strict=False)
            ]
            tokens = [encoding["input_ids"] for encoding in encodings]
            for name, column in zip(names, tokens, strict=True):
                require_tokens(column, [name], start, source)
            numbers = [
                [self._numbers.setdefault(text, len(self._numbers)) for text in row] for row in zip(*texts, strict=True)
            ]
            columns = {
                "input_ids": [list(row) for row in zip(*tokens, strict=True)],
                "numbers": numbers,
                "query": [first for first, *_ in numbers],
                "length": [max(map(len, row)) for row in zip(*tokens, strict=True)],
                "labels": labels[start : start + len(chunk)],
            }
            return columns, sum(map(count_cut, encodings))

        encoded, cut = encode_chunks(rows, encode)
        cut_notes = self._texts.cut_notes(source, cut, len(names) * len(rows), "texts")
        self.notes = (*self.notes, *empty_text_notes(rows, names, source), *cut_notes)
        return encoded


def pair_embeddings(embeddings: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The embeddings of the first and of the second texts of pairs, `[pairs, width]` each, from `[texts, width]`.

    Pairs `[pairs, 3]` are those of `SentenceSimilarity.collate`; a missing second text is replaced by the first.
    """
    counts = _text_counts(pairs)
    first = np.cumsum(counts) - counts
    return embeddings[first], embeddings[first + counts - 1]


def _text_counts(pairs: np.ndarray) -> np.ndarray:
    """The number of texts of each example, from pairs."""
    return 2 - (pairs[:, 2] == _ABSENT)
