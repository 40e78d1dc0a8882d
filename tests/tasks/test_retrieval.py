"""Retrieval: literal ranks and scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compressor.tasks.retrieval import Judgements, nearest, ranking_scores

AXES = np.eye(4)


def test_nearest_documents_are_ordered_by_cosine() -> None:
    queries = np.array([[3.0, 2.0, 1.0, 0.0], [0.0, 0.0, 1.0, 9.0]])
    assert nearest(queries, AXES * [[1], [2], [3], [4]], 2).tolist() == [[0, 1], [3, 2]]
    assert nearest(queries, AXES, 10).shape == (2, 4)
    assert nearest(queries[:0], AXES, 3).shape == (0, 3)


def test_recall_and_ndcg() -> None:
    retrieved = np.array([[0, 1, 2], [2, 1, 0], [3, 4, 5]])
    gains = ({0: 1.0}, {0: 2.0, 1: 1.0, 9: 3.0}, {0: 1.0})
    third = 1 / math.log2(4)
    second = 1 / math.log2(3)
    best = 3 + 2 * second + third
    expected = [[1, 1], [2 / 3, (second + 2 * third) / best], [0, 0]]
    assert ranking_scores(retrieved, gains) == pytest.approx(np.array(expected))


def test_judgements_merge_equal_texts_and_leave_out_queries_without_a_relevant_document() -> None:
    pairs = np.array([[1, 7, 0], [0, 7, 1], [2, 7, 0], [0, 8, 2], [1, 9, 1]])
    judgements = Judgements.of(pairs)
    assert judgements.queries.tolist() == [0, 4]
    assert judgements.documents.tolist() == [0, 1, 3]
    assert judgements.gains == ({0: 2.0}, {1: 1.0})
    first = AXES[[0, 0, 0, 3, 1]]
    second = AXES[[0, 1, 0, 2, 1]]
    assert judgements.scores(first, second).tolist() == [[1, 1], [1, 1]]
