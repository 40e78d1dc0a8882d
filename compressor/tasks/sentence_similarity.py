"""Sentence similarity: embeddings of texts, whose cosines rank pairs or retrieve the nearest documents of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import BatchEncoding

from compressor.config.sections import RowsConfig
from compressor.errors import ErrorCode, InputError, RowError
from compressor.model_folder import ModelFolder
from compressor.model_folder.example_inputs import takes_token_types
from compressor.models.sentence_encoder import EMBEDDING, RANKING, STATES, SentenceEncoder
from compressor.results import MetricUnit
from compressor.silence_libraries import quiet_transformers
from compressor.tasks.base import Task
from compressor.tasks.columns import LabelColumn, TextColumns, empty_text_notes
from compressor.tasks.encoding import chunks_of, count_cut, cut_notes, pad, padding_id, row_length
from compressor.tasks.labels import numbers_of
from compressor.tasks.metrics import Metric, column_mean, pearson, spearman
from compressor.tasks.row_store import RowStore

TOP = 10
"""Number of documents that are retrieved for a query."""
_CHUNK_ROWS = 256
"""Queries that are compared with all documents at once."""

Gains = dict[int, float]
"""Index of a document -> its relevance to a query, above zero."""
_ABSENT = -1
"""Number of the second text of a row that has one text."""
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
"""Names of the prompts of queries and documents, in the order of the library's `encode_query` and `encode_document`."""
_RECALL = Metric("recall@10", partial(column_mean, 0), MetricUnit.POINTS, maximum=1.0)
_NDCG = Metric("ndcg@10", partial(column_mean, 1), MetricUnit.POINTS, maximum=1.0)
_SPEARMAN = Metric("spearman", spearman, maximum=1.0)


@dataclass(frozen=True, eq=False)
class Judgements:
    """Queries, documents and relevances of judged pairs.

    Attributes:
        queries: for each query with a relevant document, the index of a pair that holds it, `[queries]`.
        documents: for each distinct document of all pairs, the index of a pair that holds it, `[documents]`.
        gains: for each query, its relevant documents, as indices of `documents`.
    """

    queries: np.ndarray
    documents: np.ndarray
    gains: tuple[Gains, ...]

    @classmethod
    def of(cls, pairs: np.ndarray) -> Judgements:
        """Judgements of pairs `[pairs, 3]`: relevance, number of the query, number of the document.

        Every document of the pairs can be retrieved for every query. A document without a judgement for a query, or
        with one of zero or less, is not relevant to it.
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
        """`ranking_scores` of the documents nearest to each query, `[queries, 2]`.

        Args:
            queries: embeddings of the first texts of all pairs, `[pairs, width]`.
            documents: embeddings of the second texts of all pairs, `[pairs, width]`.
        """
        return ranking_scores(nearest(queries[self.queries], documents[self.documents]), self.gains)


def nearest(queries: np.ndarray, documents: np.ndarray, count: int = TOP) -> np.ndarray:
    """Indices of the documents of largest cosine, `[queries, count]`, the largest first; fewer if there are fewer.

    Args:
        queries: embeddings `[queries, width]`.
        documents: embeddings `[documents, width]`.
        count: number of documents.
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
    """Recall and nDCG of each query, `[queries, 2]`; with more relevant documents than places, recall stays below 1.

    Recall is the number of relevant documents that are retrieved over the number of all relevant ones. The gain of a
    document is discounted by log2(1 + rank), and the sum is divided by that of the best order (Järvelin and Kekäläinen
    2002, with the relevance itself as gain, as trec_eval's ndcg_cut).

    Args:
        retrieved: indices of the retrieved documents, `[queries, count]`, the best first.
        gains: the relevant documents of each query, at least one.
    """
    discounts = 1 / np.log2(np.arange(2, retrieved.shape[1] + 2))
    scores = np.zeros((len(retrieved), 2))
    for row, (documents, relevant) in enumerate(zip(retrieved.tolist(), gains, strict=True)):
        values = np.array([relevant.get(document, 0.0) for document in documents])
        best = np.sort(list(relevant.values()))[::-1][: len(discounts)]
        scores[row] = (values > 0).sum() / len(relevant), values @ discounts / (best @ discounts[: len(best)])
    return scores


def unit_rows(embeddings: np.ndarray) -> np.ndarray:
    """Embeddings of norm one, float32; zeros stay zero."""
    embeddings = embeddings.astype(np.float32)
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), np.finfo(np.float32).tiny)


class SentenceSimilarity(Task):
    """Embeddings of texts, scored by the correlation of cosines with labels, or by retrieval.

    A row holds two texts and a number: how similar they are, or how relevant the second is to the first. For retrieval
    the second texts of all rows are the documents. Rows without labels may hold a single text.

    Args:
        folder: a folder of sentence-transformers.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the model has no pooling, or the maximum row length leaves no room for text.
    """

    name = "sentence-similarity"
    metrics: ClassVar[tuple[Metric, ...]] = (_SPEARMAN, Metric("pearson", pearson, maximum=1.0), _RECALL, _NDCG)
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
        if folder.sentence is None or not isinstance(folder.model, SentenceEncoder):
            raise InputError(
                f"{folder.path}: the model has no pooling (modules.json); save it with sentence-transformers",
                code=ErrorCode.UNSUPPORTED_MODEL,
                path=folder.path,
            )
        self._folder, self._request = folder, request
        self._model, self._sentence, self._tokenizer = folder.model, folder.sentence, folder.processor
        self._with_token_types = takes_token_types(folder.model, folder.processor)
        self._longest = row_length(folder, request, texts=1)
        self._numbers: dict[str, int] = {}
        self.set_aside_by = "query" if self.retrieves else None

    @property
    def retrieves(self) -> bool:
        """Whether the metric is one of retrieval."""
        return self._metric in (_RECALL, _NDCG)

    @property
    def chooser(self) -> Task:
        """Cosines and relevances are correlated where heads are selected: retrieval needs all rows at once."""
        return SentenceSimilarity(self._folder, self._request, _SPEARMAN) if self.retrieves else self

    @property
    def loss_outputs(self) -> tuple[str, ...]:
        """The embedding, or the ranking of documents where the model has some; see `SentenceEncoder.documents`."""
        return (EMBEDDING,) if self._model.documents is None else (RANKING,)

    def learn_labels(self, rows: Dataset, source: str) -> None:
        """Check that labels differ, which a correlation requires, or that a document is relevant to a query.

        Raises:
            InputError: a label is not a number, or all are the same.
        """
        column = self.label_column.find(rows, self._request.label_column, source)
        numbers = numbers_of(rows, column, source)
        if max(numbers) <= 0 if self.retrieves else min(numbers) == max(numbers):
            wanted = "above zero for the relevant pairs" if self.retrieves else "that differ"
            raise InputError(
                f"{source}: every row has the label {numbers[0]:g}; give rows with values of {column!r} {wanted}",
                code=ErrorCode.INVALID_ROWS,
                column=column,
                value=numbers[0],
            )

    def metric_obstacle(self, examples: Dataset) -> str | None:
        """Without differing labels there is no correlation, without a relevant document no retrieval."""
        labels = examples["labels"][:]
        if self.retrieves:
            return None if max(labels) > 0 else "no document is relevant to any query"
        return None if min(labels) < max(labels) else f"every pair has the label {labels[0]:g}"

    def encode(self, rows: Dataset, source: str) -> Dataset:
        """Encode pairs of texts.

        Columns: `input_ids`, a list of tokens per text; `numbers`, one per text, equal for equal texts; `query`, the
        first of them; `labels`; `length`, the tokens of the longest text.
        """
        names = self.pair_columns.find(rows, self._request.text_columns, source)
        column = self.label_column.find(rows, self._request.label_column, source)
        return self._encode_texts(rows, names, numbers_of(rows, column, source), source)

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        """Encode pairs of texts, or single texts; every label is zero."""
        names = self.text_columns.find(rows, self._request.text_columns, source)
        return self._encode_texts(rows, names, [0.0] * len(rows), source)

    def size_limits(self, examples: Dataset) -> tuple[int, int]:
        """The texts of an example, and the tokens of the longest text."""
        return max(map(len, examples["input_ids"][:]), default=1), max(examples["length"][:], default=1)

    def row_counts(self, rows: Dataset) -> tuple[int, int]:
        """The texts of the rows, and the tokens of the texts."""
        texts = [ids for row in rows["input_ids"][:] for ids in row]
        return len(texts), sum(map(len, texts))

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Texts `[texts, longest]`, those of a row consecutive and padded on the right, and `pairs` `[rows, 3]`.

        A pair holds the label and the numbers of both texts, float64; -1 where there is no second text.
        """
        texts = [ids for example in examples for ids in example["input_ids"]]
        batch = {
            "input_ids": pad(texts, padding_id(self._folder)),
            "attention_mask": pad([[1] * len(ids) for ids in texts], 0),
        }
        if self._with_token_types:
            batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        pairs = [(example["labels"], *(*example["numbers"], _ABSENT)[:2]) for example in examples]
        return {**batch, self.label_name: torch.tensor(pairs, dtype=torch.float64)}

    def loss_inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with `labels` `[rows]` instead of `pairs`."""
        inputs = {name: value for name, value in batch.items() if name != self.label_name}
        return {**inputs, "labels": batch[self.label_name][:, 0].float()}

    def example_means(self, values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean over the texts of each row, `[rows]`, from values `[texts]`."""
        counts = _text_counts(batch[self.label_name])
        return torch.stack([texts.mean() for texts in values.split(counts.tolist())])

    def scored_outputs(self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The outputs with embeddings, pooled here where the graph does not pool."""
        if EMBEDDING in outputs or STATES not in outputs:
            return outputs
        states = torch.from_numpy(np.asarray(outputs[STATES]))
        return {**outputs, EMBEDDING: self._model.pool(states, batch["attention_mask"]).numpy()}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Cosine and label of each row, `[rows, 2]`, from embeddings `[texts, width]`.

        For retrieval: the pair and the embeddings of its texts, `[rows, 3 + 2 width]`.
        """
        first, second = pair_embeddings(logits, labels)
        if self.retrieves:
            return np.concatenate([labels, first, second], axis=1, dtype=np.float64)
        cosines = (unit_rows(first) * unit_rows(second)).sum(1, dtype=np.float64)
        return np.stack([cosines, labels[:, 0]], axis=-1)

    def reference_text(self, example: Mapping[str, Any]) -> str:
        """The label of a pair."""
        return f"{example['labels']:.4g}"

    def summarize(self, statistics: np.ndarray) -> np.ndarray:
        """For retrieval: recall and nDCG of each query, `[queries, 2]`, from the pairs and embeddings of all rows."""
        if not self.retrieves:
            return statistics
        pairs, embeddings = np.split(statistics, [3], axis=1)
        return Judgements.of(pairs).scores(*np.split(embeddings, 2, axis=1))

    def _encode_texts(self, rows: Dataset, names: Sequence[str], labels: Sequence[float], source: str) -> Dataset:
        """The tokens and the numbers of the texts of every row; many rows are memory-mapped."""
        store, cut = RowStore(), 0
        for start, chunk in chunks_of(rows):
            texts = [list(chunk[name]) for name in names]
            encodings = [self._tokenize(column, number) for number, column in enumerate(texts)]
            cut += sum(map(count_cut, encodings))
            tokens = [encoding["input_ids"] for encoding in encodings]
            for name, column in zip(names, tokens, strict=True):
                lengths = list(map(len, column))
                if 0 in lengths:
                    row = start + lengths.index(0) + 1
                    raise RowError.of(source, row, f"no text in {name!r}; fill it or remove the row", column=name)
            encoded = {
                "input_ids": [list(row) for row in zip(*tokens, strict=True)],
                "numbers": [[self._number(text) for text in row] for row in zip(*texts, strict=True)],
                "query": [self._number(text) for text in texts[0]],
                "length": [max(map(len, row)) for row in zip(*tokens, strict=True)],
                "labels": labels[start : start + len(chunk)],
            }
            store.add(Dataset.from_dict(encoded).data.table)
        cut_note = cut_notes(source, cut, len(names) * len(rows), self._longest, "texts")
        self.notes = (*self.notes, *empty_text_notes(rows, names, source), *cut_note)
        return store.finish()

    def _tokenize(self, texts: Sequence[str], column: int) -> BatchEncoding:
        """The encoding of the texts of a column, after the prompt of queries or documents where these are retrieved."""
        if not texts:
            return BatchEncoding({"input_ids": []})
        names = (_QUERY, _DOCUMENT)[column] if self.retrieves else ()
        prepared = [self._sentence.prepare(text, *names) for text in texts]
        with quiet_transformers():
            encoding: BatchEncoding = self._tokenizer(prepared, truncation=True, max_length=self._longest)
        return encoding

    def _number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))


def pair_embeddings(embeddings: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The embeddings of the first and of the second texts of pairs, `[pairs, width]` each.

    Args:
        embeddings: `[texts, width]`, those of a pair consecutive.
        pairs: `[pairs, 3]`, see `SentenceSimilarity.collate`; the first text stands for a second one that is absent.
    """
    counts = _text_counts(pairs)
    first = np.cumsum(counts) - counts
    return embeddings[first], embeddings[first + counts - 1]


def _text_counts(pairs: Any) -> Any:
    """The number of texts of each row, from pairs, an array or a tensor."""
    return 2 - (pairs[:, 2] == _ABSENT) * 1
