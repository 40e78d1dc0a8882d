"""Sentence similarity: texts become batches, embeddings become cosines, and rows are retrieved."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder, load
from compressor.models.forwards import forward_arguments, tensors_of
from compressor.run.evaluate import agreement_of
from compressor.selection.subset_evaluator import sensitivity
from compressor.tasks import Data, batches, open_data, statistics
from compressor.tasks import data as data_module
from compressor.tasks.base import Batch
from compressor.tasks.row_files import read_rows
from compressor.tasks.sentence_similarity import Judgements, SentenceSimilarity, nearest, ranking_scores
from compressor.training.distillation import rank_documents
from compressor.units import find_sites, hooked
from tests import folders
from tests.faults import fails_with
from tests.folders import WORDS, rows_config
from tests.tasks.rows import tsv

HEADER = "label\tsentence1\tsentence2"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A sentence encoder with a prompt for queries."""
    torch.manual_seed(0)
    prompts = {"prompts": {"query": "plot "}, "default_prompt_name": None}
    path = tmp_path_factory.mktemp("encoder") / "model"
    return load(folders.save_sentence_encoder(path, config_sentence_transformers=prompts))


def pair_rows(count: int, seed: int = 0) -> list[str]:
    """Pairs that share a random number of their words, which is the label."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        first = rng.choice(WORDS, 6)
        shared = int(rng.integers(7))
        second = [*first[:shared], *rng.choice(WORDS, 6 - shared)]
        rows.append(f"{shared}\t{' '.join(first)}\t{' '.join(second)}")
    return rows


def pairs(path: Path, encoder: ModelFolder, **fields: str) -> Data:
    file = tsv(path / "pairs.tsv", *pair_rows(12), header=HEADER)
    return open_data(rows_config(file, file, file, **fields), encoder)


def embed(model: torch.nn.Module, batch: Batch) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(**forward_arguments(model, tensors_of(batch))).sentence_embedding)  # type: ignore[arg-type]


def test_a_text_without_tokens_is_named(encoder: ModelFolder, tmp_path: Path) -> None:
    tokenizer = folders.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    file = tsv(tmp_path / "pairs.tsv", "1\tgood\tbad", "0\tgood\t", header=HEADER)
    with fails_with(ErrorCode.INVALID_ROWS, row=2, column="sentence2"):
        open_data(rows_config(file, file, file), replace(encoder, processor=tokenizer))


def test_queries_of_many_rows_stay_whole(encoder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "_CANDIDATES", 4)
    rows = [f"1\tplot {word}\tgood {noun}" for word in WORDS[:6] for noun in WORDS[:4]]
    file = tsv(tmp_path / "pairs.tsv", *rows, header=HEADER)
    data = open_data(rows_config(file, metric="ndcg@10"), encoder, drawn_rows=2)
    assert len(data.train) + len(data.eval) + len(data.test) == len(rows)


def test_pairs_become_batches_of_texts(encoder: ModelFolder, tmp_path: Path) -> None:
    data = pairs(tmp_path, encoder)
    batch = data.task.collate([data.train[0], data.train[1]])
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (4, 8),
        "attention_mask": (4, 8),
        "token_type_ids": (4, 8),
        "pairs": (2, 3),
    }
    assert encoder.processor.decode(batch["input_ids"][3]) == f"[CLS] {pair_rows(2)[1].split('	')[2]} [SEP]"
    assert data.task.input_counts(data.train) == (24, 24 * 8)
    assert data.task.loss_inputs(batch)["labels"].tolist() == [float(row.split("\t")[0]) for row in pair_rows(2)]
    assert data.task.example_means(np.array([1.0, 3.0, 5.0, 5.0]), batch).tolist() == [2.0, 5.0]


def test_cosines_are_correlated_with_labels(encoder: ModelFolder, tmp_path: Path) -> None:
    data = pairs(tmp_path, encoder)
    measured = statistics(data.task, data.test, lambda batch: embed(encoder.model, batch), 5)
    first, second = (
        embed(encoder.model, dict(encoder.processor([row.split("\t")[column]], return_tensors="np")))[0]
        for row in pair_rows(1)
        for column in (1, 2)
    )
    assert measured[0] == pytest.approx([first @ second, float(data.test["labels"][0])], abs=1e-6)
    assert -1 <= data.task.score(measured) <= 1
    assert (data.task.metric, data.task.chooser) == ("spearman", data.task)


def test_the_loss_of_the_model_needs_no_scale_of_labels(encoder: ModelFolder, tmp_path: Path) -> None:
    data = pairs(tmp_path, encoder)
    batch = data.task.collate(list(data.train))
    loss = encoder.model(**tensors_of(data.task.loss_inputs(dict(batch)))).loss.item()
    batch["pairs"][:, 0] = 100 * batch["pairs"][:, 0] - 7
    assert loss > 0
    assert encoder.model(**tensors_of(data.task.loss_inputs(batch))).loss.item() == pytest.approx(loss, rel=1e-5)


def test_rows_without_labels_may_hold_one_text(encoder: ModelFolder, tmp_path: Path) -> None:
    train = tsv(tmp_path / "train.tsv", "good film", "bad", header="text")
    test = tsv(tmp_path / "test.tsv", *pair_rows(6), header=HEADER)
    data = open_data(rows_config(train, test, test), encoder, drawn_rows=2)
    batch = data.task.collate(list(data.train))
    assert batch["input_ids"].tolist() == [[2, 5, 7, 3], [2, 6, 3, 0]]
    assert batch["pairs"][:, 2].tolist() == [-1, -1]
    assert data.task.input_counts(data.train) == (2, 7)


def test_single_texts_have_no_loss(encoder: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "t.tsv", "good film", "bad", "one two", "plot", header="text")
    task = open_data(rows_config(path), encoder, drawn_rows=4).task
    texts = task.encode_unlabelled(read_rows([Path(path)])[0], "t")
    for count in (3, 4):
        batch = task.collate(list(texts)[:count])
        assert encoder.model(**tensors_of(task.loss_inputs(batch))).loss.item() == 0


def test_importance_is_the_gradient_of_each_pair(encoder: ModelFolder, tmp_path: Path) -> None:
    """The absolute value is that of the sum over both texts."""
    data = pairs(tmp_path, encoder)
    batch = tensors_of(data.task.loss_inputs(data.task.collate(list(data.train))))
    sites = find_sites(encoder.model, {"input_ids": batch["input_ids"]})
    heads = [site.heads for site in sites]
    importance = sensitivity(encoder.model, sites, torch.ones(sum(heads), dtype=torch.bool), [batch])
    gate = torch.ones(len(batch["input_ids"]), sum(heads), requires_grad=True)
    gates = dict(zip((site.name for site in sites), gate.split(heads, dim=1), strict=True))
    with hooked(encoder.model.eval(), lambda name, out: out * gates[name][:, None, :, None], sites=sites):
        (of_texts,) = torch.autograd.grad(encoder.model(**batch).loss, gate)
    of_pairs = of_texts.unflatten(0, (-1, 2)).sum(1).abs().sum(0)
    assert not torch.allclose(of_pairs, of_texts.abs().sum(0))
    torch.testing.assert_close(importance.float(), of_pairs)


def test_an_example_is_as_many_rows_as_it_has_texts(encoder: ModelFolder, tmp_path: Path) -> None:
    data = pairs(tmp_path, encoder)
    count, length = data.task.size_limits(data.test)
    assert (count, length) == (2, max(data.test["length"]))
    batch = data.task.collate(list(data.test))
    assert batch["input_ids"].shape == (count * len(data.test), length)


def test_heads_are_not_selected_by_relevances_that_are_all_one(encoder: ModelFolder, tmp_path: Path) -> None:
    file = tsv(tmp_path / "a.tsv", *(f"1\t{row.split(chr(9), 1)[1]}" for row in pair_rows(12)), header=HEADER)
    data = open_data(rows_config(file, file, file, metric="recall@10"), encoder)
    with fails_with(ErrorCode.INVALID_ROWS, field="train_data"):
        data.of_chooser()


def test_documents_are_retrieved_with_the_prompts_of_the_folder(encoder: ModelFolder, tmp_path: Path) -> None:
    rows = ["1\tgood film\tgood film", "0\tgood film\tbad plot", "1\tone two\tone two", "0\tone two\tthree"]
    file = tsv(tmp_path / "pairs.tsv", *rows, header="relevance\tquery\tpassage")
    data = open_data(rows_config(file, file, file, metric="ndcg@10"), encoder)
    assert data.test["input_ids"][0] == [[2, 8, 5, 7, 3], [2, 5, 7, 3]]
    measured = statistics(data.task, data.test, lambda batch: embed(encoder.model, batch), 3)
    assert measured.shape == (2, 2)
    assert measured[:, 0].tolist() == [1, 1], "there are fewer than ten documents"
    assert 0 < data.task.score(measured) <= 1
    assert (data.task.chooser.metric, data.task.metric_heading) == ("spearman", "ndcg@10, %")


def test_states_are_pooled_outside_of_a_graph(encoder: ModelFolder, tmp_path: Path) -> None:
    data = pairs(tmp_path, encoder)
    batch = data.task.collate(list(data.test))
    inputs = data.task.model_inputs(batch)
    network: Any = encoder.model
    with torch.no_grad():
        states = network.encoder(**tensors_of(inputs))[0].numpy()
    outputs = data.task.scored_outputs({"last_hidden_state": states}, batch)
    assert data.task.logits(outputs) == pytest.approx(embed(encoder.model, inputs), abs=1e-6)


def test_equal_engines_agree(encoder: ModelFolder, tmp_path: Path) -> None:
    data = pairs(tmp_path, encoder)
    parts = [embed(encoder.model, data.task.model_inputs(batch)) for _, batch in batches(data.task, data.test)]
    agreement = agreement_of(parts, parts, data)
    assert (agreement.texts, agreement.queries, agreement.labelled) == (24, 12, False)
    assert (agreement.cosine, agreement.dense, agreement.own, agreement.mixed) == pytest.approx((1, 1, 1, 1))
    turned = [np.roll(part, 1, axis=1) for part in parts]
    rotated = agreement_of(parts, turned, data)
    moved = [part + np.linspace(1e-4, 2e-4, part.shape[1], dtype=part.dtype) for part in parts]
    first, second = (np.concatenate(rows).astype(np.float64) for rows in (parts, moved))
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    expected = 1 - float(((first * second).sum(1) / norms).mean())
    assert 1 - agreement_of(parts, moved, data).cosine == pytest.approx(expected, rel=1e-3, abs=0)
    assert rotated.own == pytest.approx(1), "a rotation of all embeddings changes no index of its own"
    assert rotated.mixed < 1


def test_documents_of_the_rows_are_ranked(tmp_path: Path) -> None:
    encoder = load(folders.save_sentence_encoder(tmp_path / "model"))
    data = pairs(tmp_path, encoder)
    assert data.task.loss_outputs == ("sentence_embedding",)
    rank_documents(encoder, data, seed=0)
    assert encoder.model.documents.shape == (12, 16)
    assert data.task.loss_outputs == ("document_scores",)


def test_documents_need_an_encoder(classifier: ModelFolder, tmp_path: Path) -> None:
    file = tsv(tmp_path / "a.tsv", "0\ta", "1\tb")
    data = open_data(rows_config(file, file, file), classifier)
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="match_dense", task="text-classification"):
        rank_documents(classifier, data, seed=0)


def test_scores_that_are_no_numbers_are_refused(encoder: ModelFolder, tmp_path: Path) -> None:
    file = tsv(tmp_path / "a.tsv", "1\ta\tb", "high\ta\tb", header=HEADER)
    with fails_with(ErrorCode.INVALID_ROWS, column="label", row=2, value="high") as caught:
        open_data(rows_config(file), encoder)
    assert "row 2: 'label'" in str(caught.value)


@pytest.mark.parametrize(("metric", "label"), [("spearman", "1"), ("recall@10", "0")])
def test_labels_that_rank_nothing_are_refused(metric: str, label: str, encoder: ModelFolder, tmp_path: Path) -> None:
    file = tsv(tmp_path / "a.tsv", f"{label}\ta\tb", f"{label}\tc\td", header=HEADER)
    with fails_with(ErrorCode.INVALID_ROWS, column="label", value=float(label)):
        open_data(rows_config(file, metric=metric), encoder)


@pytest.mark.parametrize(("metric", "label"), [("spearman", "1"), ("recall@10", "0")])
def test_test_rows_that_rank_nothing_are_refused(metric: str, label: str, encoder: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "a.tsv", *pair_rows(12), header=HEADER)
    test = tsv(tmp_path / "b.tsv", f"{label}\ta\tb", f"{label}\tc\td", header=HEADER)
    with fails_with(ErrorCode.INVALID_ROWS, field="test_data"):
        open_data(rows_config(rows, rows, test, metric=metric), encoder)


@pytest.mark.parametrize("metric", ["spearman", "recall@10"])
def test_evaluation_rows_from_rows_without_labels_are_not_scored(
    metric: str, encoder: ModelFolder, tmp_path: Path
) -> None:
    texts = tsv(tmp_path / "a.tsv", *(f"plot {'good ' * number}" for number in range(1, 13)), header="text")
    test = tsv(tmp_path / "b.tsv", *pair_rows(12), header=HEADER)
    data = open_data(rows_config(texts, test_data=test, metric=metric), encoder, drawn_rows=4)
    assert len(data.train) + len(data.eval) == 12
    assert len(data.test) == 12


@pytest.mark.parametrize("queries", [3, 10, 14])
def test_few_queries_are_divided(queries: int, encoder: ModelFolder, tmp_path: Path) -> None:
    rows = [f"1\tplot {'good ' * query}\tfilm {'bad ' * number}" for query in range(queries) for number in range(3)]
    data = open_data(rows_config(tsv(tmp_path / "a.tsv", *rows, header=HEADER), metric="recall@10"), encoder)
    assert [len(set(split["query"])) for split in (data.train, data.eval, data.test)] == [queries - 2, 1, 1]


def test_queries_are_set_aside_whole(encoder: ModelFolder, tmp_path: Path) -> None:
    texts = [(f"plot {'good ' * query}", f"film {'bad ' * number}") for query in range(15) for number in range(4)]
    file = tsv(tmp_path / "a.tsv", *(f"1\t{query}\t{passage}" for query, passage in texts), header=HEADER)
    data = open_data(rows_config(file, metric="recall@10"), encoder)
    queries = [set(split["query"]) for split in (data.train, data.eval, data.test)]
    assert sum(map(len, queries)) == len(set.union(*queries)) == 15
    assert all(queries)


def test_labelled_rows_need_two_texts(encoder: ModelFolder, tmp_path: Path) -> None:
    with fails_with(ErrorCode.COLUMN_MISSING, field="text_columns"):
        open_data(rows_config(tsv(tmp_path / "a.tsv", "1\ta", "2\tb")), encoder)


def test_texts_need_room(encoder: ModelFolder) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, field="max_length", value=2, minimum=3):
        SentenceSimilarity(encoder, rows_config(max_length=2), SentenceSimilarity.metrics[0])


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
