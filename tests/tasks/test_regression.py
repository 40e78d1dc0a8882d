"""Regression: rows become tokens and numbers, and logits become correlations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import spearmanr
from sklearn.metrics import ndcg_score

from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, load
from compressor.models.forwards import tensors_of
from compressor.results import MetricUnit, NoteCode
from compressor.tasks import Data, open_data, statistics
from compressor.tasks.regression import Reranking, query_scores
from tests import folders
from tests.faults import fails_with
from tests.folders import WORDS, rows_config
from tests.rerankers import save_causal_reranker, save_reranker
from tests.tasks.rows import forward_of, jsonl, tsv


def test_rows_become_batches_and_correlations(scorer: ModelFolder, tmp_path: Path) -> None:
    rows = [f"{index / 4}\t{'good ' * (index % 3)}{index}\tbad" for index in range(12)]
    path = tsv(tmp_path / "a.tsv", *rows, header="score\tsentence1\tsentence2")
    data = open_data(rows_config(path, path, path), scorer)
    batch = data.task.collate([data.train[index] for index in range(4)])
    assert (batch["labels"].dtype, batch["labels"].tolist()) == (np.float32, [0.0, 0.25, 0.5, 0.75])
    outputs = scorer.model(**tensors_of(batch))
    assert outputs.loss.item() == pytest.approx(
        ((outputs.logits[:, 0] - tensors_of(batch)["labels"]) ** 2).mean().item()
    )
    measured = statistics(data.task, data.test, forward_of(scorer.model), 5)
    assert measured[:, 1].tolist() == [index / 4 for index in range(12)]
    assert data.task.score(measured) == pytest.approx(spearmanr(measured[:, 0], measured[:, 1]).statistic)
    assert (data.task.metric, data.task.metric_unit) == ("spearman", MetricUnit.RAW)


def test_equal_labels_are_refused(scorer: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="label", value=1.0):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "1\ta", "1\tb")), scorer)


def test_equal_labels_of_test_rows_are_refused(scorer: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "a.tsv", "1\ta", "2\tb")
    with fails_with(ErrorCode.INVALID_ROWS, field="test_data"):
        open_data(rows_config(rows, rows, tsv(tmp_path / "t.tsv", "-1.0\ta", "-1.0\tb")), scorer)


def test_labels_that_are_not_numbers_are_refused(scorer: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="label", row=1, value="high"):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "high\ta", "1\tb")), scorer)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A BERT that predicts two numbers."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("several")
    return load(folders.save(folders.bert(problem_type="regression", id2label={0: "joy", 1: "fear"}), path))


def _numbers(index: int) -> tuple[float, float]:
    return index / 4, float((7 * index) % 12)


def test_several_numbers_have_the_mean_of_their_correlations(several: ModelFolder, tmp_path: Path) -> None:
    texts = [f"{'good ' * (index % 3)}{index}" for index in range(12)]
    lists = jsonl(
        tmp_path / "a.jsonl",
        *({"text": text, "labels": list(_numbers(index))} for index, text in enumerate(texts)),
    )
    rows = ["\t".join((text, *(f"{number}" for number in _numbers(index)))) for index, text in enumerate(texts)]
    columns = tsv(tmp_path / "a.tsv", *rows, header="text\tjoy\tfear")
    data, of_columns = (open_data(rows_config(path, path, path), several) for path in (lists, columns))
    assert list(data.train["labels"]) == list(of_columns.train["labels"]) == [list(_numbers(i)) for i in range(12)]
    batch = data.task.collate(list(data.train))
    loss = several.model(**tensors_of(batch)).loss.item()
    measured = statistics(data.task, data.test, forward_of(several.model), 5)
    assert loss == pytest.approx(np.square(measured[:, :2] - measured[:, 2:]).mean(), rel=1e-5)
    expected = [spearmanr(measured[:, number], measured[:, 2 + number]).statistic for number in range(2)]
    assert data.task.score(measured) == pytest.approx(np.mean(expected))
    assert data.task.constant_score(measured) == 0
    assert data.task.encode_unlabelled(Dataset.from_dict({"text": ["good"]}), "rows")["labels"][:] == [[0.0, 0.0]]


def test_one_number_for_a_model_of_several_is_refused(several: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, row=1, column="label", count=2):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "1\ta", "2\tb")), several)


def test_a_number_that_is_the_same_in_every_row_is_refused(several: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.INVALID_ROWS, column="fear", value=3.0):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "a\t1\t3", "b\t2\t3", header="text\tjoy\tfear")), several)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    torch.manual_seed(0)
    library: dict[str, Any] = {"prompts": {"web": "very good"}, "default_prompt_name": "web"}
    return load(save_causal_reranker(tmp_path_factory.mktemp("causal"), **library))


PAIRS = [
    (f"good {WORDS[query]}", f"{' '.join(WORDS[: 2 + document % 3])} {WORDS[query + document]}", (query + document) % 3)
    for query in range(8)
    for document in range(5)
]


@pytest.fixture
def grouped(tmp_path: Path) -> str:
    """Pairs of eight queries with five documents each."""
    return tsv(tmp_path / "rows.tsv", *("\t".join(map(str, pair)) for pair in PAIRS), header="query\tpassage\tlabel")


def test_orders_are_scored_as_in_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    rows = np.concatenate(
        [
            np.stack([generator.permutation(n) + 0.0, generator.integers(0, 4, n), np.full(n, query)], axis=1)
            for query, n in enumerate((2, 5, 15, 30))
        ]
    )
    rows[0, 1] = rows[2, 1] = 1
    values = query_scores(rows)
    for query, (ndcg, reciprocal) in enumerate(values):
        scores, labels, _ = rows[rows[:, 2] == query].T
        assert ndcg == pytest.approx(ndcg_score([labels], [scores], k=10))
        ranks = np.flatnonzero(labels[np.argsort(-scores)] > 0) + 1
        assert reciprocal == pytest.approx(1 / ranks[0] if ranks[0] <= 10 else 0)
    shuffled = generator.permutation(len(rows))
    np.testing.assert_allclose(query_scores(rows[shuffled]), values)


def test_equal_scores_do_not_count_as_an_order() -> None:
    rows = np.array([[0.0, 1.0, 7.0], [0.0, 0.0, 7.0], [0.0, 0.0, 7.0]])
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        assert query_scores(rows[order]).tolist() == [[pytest.approx(1 / np.log2(4)), pytest.approx(1 / 3)]]


def test_queries_without_a_relevant_document_are_left_out() -> None:
    rows = np.array([[0.0, 0.0, 1.0], [1.0, -2.0, 1.0], [0.0, 3.0, 2.0]])
    assert query_scores(rows).tolist() == [[1.0, 1.0]]
    late = np.array([[-float(rank), float(rank == 10), 0.0] for rank in range(12)])
    assert query_scores(late).tolist() == [[0.0, 0.0]]


def test_pairs_of_queries_are_ordered_unless_another_metric_is_named(scorer: ModelFolder, grouped: str) -> None:
    data = open_data(rows_config(grouped), scorer)
    assert (data.task.metric, NoteCode.METRIC_CHOSEN in {note.code for note in data.notes}) == ("ndcg@10", True)
    parts = [set(part["query"]) for part in (data.train, data.eval, data.test)]
    assert all(parts)
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2], "queries stay whole"
    assert data.task.chooser.metric == "spearman"
    measured = statistics(data.task, data.test, forward_of(scorer.model))
    assert measured.shape == (len(parts[2]), 2)
    assert data.task.score(measured) == pytest.approx(measured[:, 0].mean())
    for metric in ("spearman", "mrr@10"):
        assert open_data(rows_config(grouped, metric=metric), scorer).task.metric == metric


def test_pairs_without_groups_are_correlated(scorer: ModelFolder, tmp_path: Path) -> None:
    rows = [f"{WORDS[index]}\tgood\t{index % 4}" for index in range(20)]
    path = tsv(tmp_path / "a.tsv", *rows, header="query\tpassage\tlabel")
    data = open_data(rows_config(path, path, path), scorer)
    assert (data.task.metric, data.task.set_aside_by) == ("spearman", None)
    numbered = [f"{index % 4}\t{row}" for index, row in enumerate(rows)]
    path = tsv(tmp_path / "b.tsv", *numbered, header="query_id\tquery\tpassage\tlabel")
    assert open_data(rows_config(path, path, path), scorer).task.metric == "spearman", (
        "all documents of a query are as relevant"
    )


def test_a_column_of_queries_groups_rows(scorer: ModelFolder, tmp_path: Path) -> None:
    rows = [f"q{index // 5}\t{WORDS[index % 20]}\t{index % 3}" for index in range(40)]
    path = tsv(tmp_path / "a.tsv", *rows, header="qid\ttext\tlabel")
    data = open_data(rows_config(path, path, path), scorer)
    assert (data.task.metric, len(set(data.test["query"]))) == ("ndcg@10", 8)


def test_the_loss_is_that_of_the_labels(scorer: ModelFolder, grouped: str) -> None:
    data = open_data(rows_config(grouped, grouped, grouped), scorer)
    batch = data.task.collate(list(data.train)[:4])
    output = scorer.model(**tensors_of(data.task.loss_inputs(batch)))
    expected = torch.nn.functional.mse_loss(output.logits[:, 0], torch.tensor([float(p[2]) for p in PAIRS[:4]]))
    assert output.loss.item() == pytest.approx(expected.item())


def test_rows_without_labels_stand_behind_those_with_them(scorer: ModelFolder, grouped: str, tmp_path: Path) -> None:
    further = tsv(tmp_path / "b.tsv", "good\tbad", "bad\tplot", header="query\tpassage")
    data: Data = open_data(rows_config(grouped, unlabelled_data=further), scorer, drawn_rows=100)
    assert data.task.collate(list(data.train)[-2:])["pairs"][:, 0].tolist() == [0.0, 0.0]


def test_no_relevant_document_has_no_order(scorer: ModelFolder, grouped: str, tmp_path: Path) -> None:
    none = tsv(tmp_path / "b.tsv", "a\tb\t0", "a\tc\t-1", header="query\tpassage\tlabel")
    with fails_with(ErrorCode.INVALID_ROWS, field="test_data"):
        open_data(rows_config(grouped, test_data=none), scorer)


def _encoded(folder: ModelFolder, pairs: list[tuple[Any, ...]]) -> tuple[Reranking, Dataset]:
    task = open_data(rows_config(*[_rows_of(folder, pairs)] * 3, max_length=64), folder).task
    assert isinstance(task, Reranking)
    rows = Dataset.from_dict({"query": [pair[0] for pair in pairs], "passage": [pair[1] for pair in pairs]})
    return task, task.encode_unlabelled(rows, "rows")


def _rows_of(folder: ModelFolder, pairs: list[tuple[Any, ...]]) -> str:
    rows = ["\t".join(map(str, (pair[0], pair[1], index % 3))) for index, pair in enumerate(pairs)]
    return tsv(folder.path / "rows.tsv", *rows, header="query\tpassage\tlabel")


def test_pairs_are_rendered_by_the_template(causal: ModelFolder) -> None:
    task, encoded = _encoded(causal, PAIRS)
    tokenizer = causal.processor
    for row, (query, document, _) in zip(encoded, PAIRS, strict=True):
        expected = f"the very good one {query} two {document} three four"
        assert list(row["input_ids"]) == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert task.vocabulary is None
    assert "token_type_ids" not in task.collate(list(encoded))


def test_long_pairs_keep_the_end_of_the_template(causal: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", f"good\t{'bad ' * 40}\t1", "a\tb\t0", "a\tc\t2", header="query\tpassage\tlabel")
    data = open_data(rows_config(path, path, path, max_length=64), causal)
    ends = causal.processor("three four", add_special_tokens=False)["input_ids"]
    assert [list(row["input_ids"])[-2:] for row in data.train] == [ends] * 3
    assert data.train["length"][0] == 18, "max_seq_length of the folder"
    assert NoteCode.ROWS_CUT in {note.code for note in data.notes}


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ raise_exception('no roles') }}"])
def test_a_template_without_a_pair_is_refused(template: str, tmp_path: Path) -> None:
    folder = load(save_causal_reranker(tmp_path / "model", template=template))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="chat_template"):
        open_data(rows_config(_rows_of(folder, PAIRS)), folder)


def test_a_language_model_without_a_template_reads_joined_pairs(tmp_path: Path) -> None:
    folder = load(save_causal_reranker(tmp_path / "model", template=None))
    _, encoded = _encoded(folder, PAIRS[:4])
    expected = folder.processor(PAIRS[0][0], PAIRS[0][1])["input_ids"]
    assert list(encoded["input_ids"][0]) == expected


@pytest.mark.parametrize("save", [save_reranker, save_causal_reranker])
def test_scores_are_those_of_the_library(save: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", minversion="6")
    torch.manual_seed(0)
    folder = load(save(tmp_path / "model"))
    pairs = [*PAIRS[:6], ("good", "bad " * 40, 1)]
    task, encoded = _encoded(folder, pairs)
    batch = task.collate(list(encoded))
    del batch["pairs"]
    with torch.no_grad():
        scores = folder.model(**tensors_of(batch)).logits[:, 0]
    encoder = library.CrossEncoder(str(folder.path), device="cpu")
    expected = encoder.predict([pair[:2] for pair in pairs], activation_fn=torch.nn.Identity())
    torch.testing.assert_close(scores, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
