"""A reranker goes in, and a pruned one comes out whose metric is that of an independent computation on its engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import ndcg_score

import compressor
from compressor.model_folder import load
from compressor.targets import target
from tests.folders import WORDS
from tests.rerankers import save_causal_reranker, save_reranker
from tests.run.runs import learning_recipe
from tests.tasks.rows import tsv

QUERIES, DOCUMENTS = 6, 12
Scores = Callable[[dict[str, np.ndarray]], np.ndarray]


def _pairs(*, grouped: bool) -> list[tuple[str, str, int]]:
    """Queries with more documents than are ranked, one of them without a relevant one; or a query of its own a row."""
    generator = np.random.default_rng(0)
    pairs = []
    for query, document in np.ndindex(QUERIES, DOCUMENTS):
        label = 0 if query == 0 else int(generator.choice(4, p=(0.7, 0.1, 0.1, 0.1)))
        words = " ".join(generator.choice(WORDS, 3))
        pairs.append((f"{WORDS[query]} film {'' if grouped else WORDS[document]}".strip(), words, label))
    return pairs


def _inputs(folder: Any, save: Any, query: str, document: str) -> dict[str, np.ndarray]:
    """One pair as the tokenizer alone encodes it; for a language model as its template reads."""
    if save is save_causal_reranker:
        encoded = folder.processor(f"one {query} two {document} three four", add_special_tokens=False)
    else:
        encoded = folder.processor(query, document)
    names = ("input_ids", "attention_mask") if save is save_causal_reranker else encoded
    return {name: np.array([encoded[name]], dtype=np.int64) for name in names}


def _ndcg(scores: np.ndarray, labels: np.ndarray) -> float:
    values = [ndcg_score([gains], [row], k=10) for row, gains in zip(scores, labels, strict=True) if gains.any()]
    assert len(values) == QUERIES - 1
    return float(np.mean(values))


def _mrr(scores: np.ndarray, labels: np.ndarray) -> float:
    values = []
    for row, gains in zip(scores, labels, strict=True):
        if not gains.any():
            continue
        ranks = [rank for rank, index in enumerate(sorted(range(len(row)), key=lambda i: -row[i]), 1) if gains[index]]
        values.append(1 / ranks[0] if ranks[0] <= 10 else 0)
    assert len(values) == QUERIES - 1
    return float(np.mean(values))


def _spearman(scores: np.ndarray, labels: np.ndarray) -> float:
    return float(spearmanr(scores.ravel(), labels.ravel()).statistic)


@pytest.mark.parametrize(
    ("save", "metric", "expected"),
    [
        pytest.param(save_reranker, "ndcg@10", _ndcg, marks=pytest.mark.zoo),
        pytest.param(save_reranker, "spearman", _spearman, marks=pytest.mark.zoo),
        pytest.param(save_causal_reranker, "ndcg@10", _ndcg, marks=pytest.mark.zoo),
        pytest.param(save_causal_reranker, "mrr@10", _mrr, marks=pytest.mark.zoo),
        pytest.param(save_causal_reranker, "spearman", _spearman, marks=pytest.mark.zoo),
    ],
)
def test_the_metric_is_that_of_the_scores_of_both_engines(
    save: Any, metric: str, expected: Callable[[np.ndarray, np.ndarray], float], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, out = save(tmp_path / "model"), tmp_path / "out"
    pairs = _pairs(grouped=metric != "spearman")
    rows = tsv(tmp_path / "rows.tsv", *("\t".join(map(str, pair)) for pair in pairs), header="query\tpassage\tlabel")
    splits = {"data": rows, "eval_data": rows, "test_data": rows, "max_length": 16}
    named = {"metric": metric} if metric == "mrr@10" else {}
    report = compressor.compress(
        learning_recipe(tmp_path, out, keep=None, training_steps=None, macs="70%", **splits, **named)
    )
    assert report.plan.heads_kept + report.plan.neurons_kept < report.plan.heads + report.plan.neurons
    assert all(proof.holds for proof in report.proofs)

    folder = load(model)
    engine = target("ort").load(out / "engine.onnx")

    def whole(inputs: dict[str, np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
            return np.asarray(folder.model(**tensors).logits)

    labels = np.array([label for *_, label in pairs]).reshape(QUERIES, DOCUMENTS)
    (score,) = report.scores
    assert (score.metric, score.rows) == (metric, len(pairs))
    run: Scores
    for value, run in ((score.dense, whole), (score.compressed, lambda inputs: engine.run(inputs)["logits"])):
        answers = np.array([run(_inputs(folder, save, *pair[:2])).item() for pair in pairs]).reshape(labels.shape)
        assert len(np.unique(answers)) > len(pairs) // 2, "pairs are told apart"
        assert value == pytest.approx(expected(answers, labels), abs=1e-4)
