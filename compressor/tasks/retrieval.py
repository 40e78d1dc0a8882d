"""Retrieval: the documents nearest to a query by the cosine of their embeddings, and how many of them are relevant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOP = 10
"""Number of documents that are retrieved for a query."""
_CHUNK_ROWS = 256
"""Queries that are compared with all documents at once."""

Gains = dict[int, float]
"""Index of a document -> its relevance to a query, above zero."""


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
