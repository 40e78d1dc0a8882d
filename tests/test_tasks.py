"""Tasks: rows to examples and batches, outputs to a metric that any resample of the rows gives exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from compressor.errors import InputError, UsageError
from compressor.model_folder import ModelFolder, fingerprint, load
from compressor.tasks import Data, batches, open_data, statistics
from compressor.tasks.metrics import accuracy, f1, matthews, pearson, perplexity, spearman
from tests import folders
from tests.folders import Request
from tests.zoo import FAMILIES

SST2 = Path(__file__).parents[2] / "shared" / "data" / "sst2.tsv.xz"
MINILM = Path(__file__).parents[2] / "shared" / "models" / "minilm-sst2"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    torch.manual_seed(0)
    return load(folders.save(folders.bert(), tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    torch.manual_seed(0)
    return load(folders.save(folders.bert(num_labels=1), tmp_path_factory.mktemp("scorer")))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    torch.manual_seed(0)
    return load(folders.save(folders.gpt2(), tmp_path_factory.mktemp("gpt2")))


def tsv(path: Path, *rows: str, header: str = "label\ttext") -> str:
    path.write_text("\n".join((header, *rows)) + "\n")
    return str(path)


def labelled(count: int) -> list[str]:
    return [f"{index % 2}\t{' '.join(['good', 'bad', 'very'][: index % 3 + 1])} {index}" for index in range(count)]


def logits_of(folder: ModelFolder) -> Any:
    def forward(batch: dict[str, torch.Tensor]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(folder.model(**batch).logits)

    return forward


def ids(rows: Dataset) -> list[list[int]]:
    return [list(row) for row in rows["input_ids"]]


# Classification


def test_one_text(bert: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "1\tgood film", "0\tvery bad", "1\tgood")
    data = open_data(Request(path, path, path), bert)
    assert ids(data.train) == [[2, 5, 7, 3], [2, 11, 6, 3], [2, 5, 3]]
    assert list(data.train["labels"]) == [1, 0, 1]
    batch = data.task.collate([data.train[0], data.train[2]])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[2, 5, 7, 3], [2, 5, 3, 0]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]],
        "token_type_ids": [[0, 0, 0, 0], [0, 0, 0, 0]],
        "labels": [1, 1],
    }
    assert torch.isfinite(bert.model(**batch).loss)


def test_two_texts(bert: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "0\tgood\tbad", "1\tbad\tgood", header="label\tpremise\thypothesis")
    data = open_data(Request(path, path, path), bert)
    assert ids(data.train) == [[2, 5, 3, 6, 3], [2, 6, 3, 5, 3]]
    assert list(data.train["token_type_ids"][0]) == [0, 0, 0, 1, 1]


def test_long_texts_are_cut(bert: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", "0\t" + "good " * 40, "1\tbad")
    assert list(open_data(Request(path, path, path, max_length=6), bert).train["length"]) == [6, 3]
    assert list(open_data(Request(path, path, path, max_length=999), bert).train["length"]) == [20, 3]


def test_a_language_model_that_classifies_gets_padding(tmp_path: Path) -> None:
    path = folders.save(folders.gpt2(hf.GPT2ForSequenceClassification), tmp_path / "model", with_tokenizer=False)
    tokenizer = folders.tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "[SEP]", None
    tokenizer.save_pretrained(path)
    folder = load(path)
    rows = tsv(tmp_path / "a.tsv", "0\tgood film", "1\tbad")
    data = open_data(Request(rows, rows, rows), folder)
    batch = data.task.collate(list(data.eval))
    assert batch["input_ids"].tolist() == [[2, 5, 7, 3], [2, 6, 3, 3]]
    assert "token_type_ids" not in batch  # GPT-2 takes an input of that name for something else
    together = logits_of(folder)(batch)
    alone = [logits_of(folder)(data.task.collate([row])) for row in data.eval]
    assert together == pytest.approx(np.concatenate(alone), abs=1e-6)


def test_a_model_of_several_classes_at_once_is_refused(tmp_path: Path) -> None:
    several = load(folders.save(folders.bert(problem_type="multi_label_classification"), tmp_path / "model"))
    with pytest.raises(InputError, match="gives a row several classes at once"):
        open_data(Request(tsv(tmp_path / "a.tsv", *labelled(8))), several)


def test_training_leaves_the_fingerprint_to_the_weights(bert: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled(8))
    data = open_data(Request(path, path, path), bert)
    bert.model(**data.task.collate(list(data.train)))  # transformers notes the kind of loss in the configuration
    assert fingerprint(bert.model) == bert.fingerprint


def test_a_model_without_segments_is_given_none(tmp_path: Path) -> None:
    distilbert, _ = FAMILIES["distilbert"](0)
    rows = tsv(tmp_path / "a.tsv", "0\tgood\tbad", "1\tbad\tgood", header="label\tpremise\thypothesis")
    data = open_data(Request(rows, rows, rows), load(folders.save(distilbert, tmp_path / "model")))
    assert list(data.task.collate(list(data.eval))) == ["input_ids", "attention_mask", "labels"]


# Splits and what is set aside


def test_the_split_column_says_what_is_what(bert: ModelFolder, tmp_path: Path) -> None:
    rows = ["train\t1\tgood", "train\t0\tbad", "dev\t1\tone", "test\t0\ttwo"]
    data = open_data(Request(tsv(tmp_path / "a.tsv", *rows, header="split\tlabel\ttext")), bert)
    assert [len(part) for part in (data.train, data.eval, data.test)] == [2, 1, 1]
    assert [note.split(" of ")[0] for note in data.notes] == [
        "the eval rows are the split 'dev'",
        "the test rows are the split 'test'",
    ]


def test_a_split_whose_labels_are_withheld_is_not_used_unasked(
    bert: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["no", "yes"])})

    def rows(*labels: int) -> Dataset:
        return Dataset.from_dict({"sentence": ["good"] * len(labels), "label": list(labels)}, features=features)

    found = DatasetDict({"train": rows(0, 1), "validation": rows(0, 1, 0, 1), "test": rows(-1, -1)})
    monkeypatch.setattr("compressor.tasks.splits.load_dataset", lambda *names: found)
    data = open_data(Request("glue:sst2"), bert)
    assert [len(part) for part in (data.train, data.eval, data.test)] == [2, 2, 2]
    assert data.notes[1] == "the split 'test' of glue:sst2 is not used, its labels are withheld"
    with pytest.raises(InputError, match="its labels are withheld"):
        open_data(Request("glue:sst2", test_data="glue:sst2"), bert)


def test_a_file_that_is_named_twice_is_divided_by_its_splits(bert: ModelFolder, tmp_path: Path) -> None:
    rows = ["train\t1\tgood", "train\t0\tbad", "dev\t1\tone"]
    path = tsv(tmp_path / "a.tsv", *rows, header="split\tlabel\ttext")
    data = open_data(Request(path, path, tsv(tmp_path / "t.tsv", "0\ttwo")), bert)
    assert [len(part) for part in (data.train, data.eval, data.test)] == [2, 1, 1]


def test_test_rows_are_set_aside_from_the_evaluation_rows(bert: ModelFolder, tmp_path: Path) -> None:
    train, evaluation = tsv(tmp_path / "a.tsv", *labelled(6)), tsv(tmp_path / "b.tsv", *labelled(20))
    whole = ids(open_data(Request(train, evaluation, evaluation), bert).eval)
    first, again, other = (open_data(Request(train, evaluation, seed=seed), bert) for seed in (1, 1, 2))
    assert (len(first.eval), len(first.test)) == (10, 10)
    assert sorted(ids(first.eval) + ids(first.test)) == sorted(whole)
    assert ids(first.test) == ids(again.test) != ids(other.test)
    assert first.notes == (
        "no test data was given: 10 of the evaluation rows, drawn with seed 1, were set aside for it",
    )


def test_training_rows_alone_serve_everything(bert: ModelFolder, tmp_path: Path) -> None:
    data = open_data(Request(tsv(tmp_path / "a.tsv", *labelled(40))), bert)
    assert [len(part) for part in (data.train, data.eval, data.test)] == [36, 2, 2]
    assert len(data.notes) == 2


def test_a_plan_needs_no_training_rows(bert: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled(8))
    data = open_data(Request(eval_data=path), bert)
    assert ([len(part) for part in (data.train, data.eval, data.test)], data.train_hash) == ([0, 4, 4], None)
    data = open_data(Request(test_data=path), bert)
    assert [len(part) for part in (data.train, data.eval, data.test)] == [0, 0, 8]


def test_the_hash_is_of_the_rows_not_of_the_file(bert: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "a.tsv", "1\tgood", "0\tbad")
    (tmp_path / "b.jsonl").write_text('{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n')
    other = tsv(tmp_path / "c.tsv", "0\tgood", "1\tbad")
    hashes = [
        open_data(Request(path, rows, rows), bert).train_hash for path in (rows, str(tmp_path / "b.jsonl"), other)
    ]
    assert hashes[0] == hashes[1] != hashes[2]
    assert str(hashes[0]).startswith("sha256:")


FAULTS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "one class": (("label\ttext", "1\ta", "1\tb"), {}, "every row has the label '1'"),
    "no label": (("gold\ttext", "1\ta", "0\tb"), {}, "no label column among gold, text"),
    "no text": (("label\tbody", "1\ta", "0\tb"), {}, "no column of text among label, body"),
    "a class too many": (("label\ttext", "1\ta", "2\tb"), {}, "label 2 is outside the model's range 0 to 1"),
    "no rows": (("label\ttext",), {}, "holds no row"),
    "no length": (("label\ttext", "1\ta", "0\tb"), {"max_length": 3}, "3 tokens a row leave no room"),
    "too few to divide": (
        ("split\tlabel\ttext", "train\t1\ta", "train\t0\tb", "dev\t1\ta"),
        {},
        "too few to set one aside",
    ),
    "no split for it": (
        ("split\tlabel\ttext", "dev\t1\ta", "test\t0\tb"),
        {},
        r"none of its splits \(dev, test\) is for train",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_data_are_one_line(bert: ModelFolder, tmp_path: Path, fault: str) -> None:
    (header, *rows), options, says = FAULTS[fault]
    with pytest.raises(InputError, match=says) as caught:
        open_data(Request(tsv(tmp_path / "a.tsv", *rows, header=header), **options), bert)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


def test_an_unknown_metric_a_missing_tokenizer_and_a_task_without_rows(bert: ModelFolder, tmp_path: Path) -> None:
    path = tsv(tmp_path / "a.tsv", *labelled(8))
    with pytest.raises(UsageError, match="--metric bleu: text-classification is scored by accuracy, f1, matthews"):
        open_data(Request(path, metric="bleu"), bert)
    bare = load(folders.save(folders.bert(), tmp_path / "bare", with_tokenizer=False), needs_processor=False)
    with pytest.raises(InputError, match="no tokenizer"):
        open_data(Request(path), bare)
    encoder = load(folders.save(folders.bert_encoder(), tmp_path / "encoder"))
    with pytest.raises(InputError, match="rows for the task feature-extraction are not read"):
        open_data(Request(path), encoder)
    with pytest.raises(InputError, match="no rows were given"):
        open_data(Request(), bert)


# Evaluation


def test_batches_are_of_like_length_and_every_row_is_scored_once(bert: ModelFolder, tmp_path: Path) -> None:
    data = open_data(Request(tsv(tmp_path / "a.tsv", *labelled(40))), bert)
    seen = list(batches(data.task, data.train, 8))
    assert sorted(index for indices, _ in seen for index in indices) == list(range(len(data.train)))
    widths = [batch["input_ids"].shape[1] for _, batch in seen]
    assert widths == sorted(widths, reverse=True)


def test_statistics_do_not_depend_on_the_batch(bert: ModelFolder, tmp_path: Path) -> None:
    data = open_data(Request(tsv(tmp_path / "a.tsv", *labelled(40))), bert)
    done: list[int] = []
    whole = statistics(data.task, data.train, logits_of(bert), 36)
    assert np.array_equal(whole, statistics(data.task, data.train, logits_of(bert), 5, done.append))
    assert sum(done) == 36
    assert whole[:, 1].tolist() == list(data.train["labels"])
    assert data.task.score(whole) == np.mean(whole[:, 0] == whole[:, 1])


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews"])
def test_metrics_of_classes(bert: ModelFolder, tmp_path: Path, metric: str) -> None:
    data = open_data(Request(tsv(tmp_path / "a.tsv", *labelled(40)), metric=metric), bert)
    predicted, labels = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1])
    logits = np.eye(2)[predicted]
    expected = {"accuracy": 0.6, "f1": 2 / 3, "matthews": 1 / 6}[metric]
    assert data.task.score(data.task.per_example(logits, labels)) == pytest.approx(expected)
    assert (data.task.metric, data.task.higher_is_better) == (metric, True)


CLASSES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30)


@settings(deadline=None)
@given(CLASSES)
def test_metrics_agree_with_their_definition(pairs: list[tuple[int, int]]) -> None:
    predicted, labels = np.array(pairs).T
    assert accuracy(predicted, labels) == pytest.approx(sum(one == other for one, other in pairs) / len(pairs))
    average = "binary" if max(predicted.max(), labels.max()) <= 1 else "macro"
    assert f1(predicted, labels) == pytest.approx(f1_score(labels, predicted, average=average, zero_division=0.0))
    undefined = len(set(predicted)) == 1 or len(set(labels)) == 1
    assert matthews(predicted, labels) == pytest.approx(0 if undefined else matthews_corrcoef(labels, predicted))


# Regression


def test_regression(scorer: ModelFolder, tmp_path: Path) -> None:
    rows = [f"{index / 4}\t{'good ' * (index % 3)}{index}\tbad" for index in range(12)]
    path = tsv(tmp_path / "a.tsv", *rows, header="score\tsentence1\tsentence2")
    data = open_data(Request(path, path, path), scorer)
    batch = data.task.collate([data.train[index] for index in range(4)])
    assert (batch["labels"].dtype, batch["labels"].tolist()) == (torch.float32, [0.0, 0.25, 0.5, 0.75])
    predicted = scorer.model(**batch)
    assert predicted.loss.item() == pytest.approx(((predicted.logits[:, 0] - batch["labels"]) ** 2).mean().item())
    found = statistics(data.task, data.test, logits_of(scorer), 5)
    assert found[:, 1].tolist() == [index / 4 for index in range(12)]
    assert data.task.score(found) == pytest.approx(spearmanr(found[:, 0], found[:, 1]).statistic)


def test_faults_of_regression(scorer: ModelFolder, tmp_path: Path) -> None:
    for rows, says in (
        (("1\ta", "1\tb"), "every row has the label 1"),
        (("high\ta", "1\tb"), "regression needs a number"),
    ):
        with pytest.raises(InputError, match=says):
            open_data(Request(tsv(tmp_path / "a.tsv", *rows)), scorer)
    several = load(folders.save(folders.bert(problem_type="regression"), tmp_path / "several"))
    with pytest.raises(InputError, match="its head has 2 outputs, regression has one"):
        open_data(Request(tsv(tmp_path / "a.tsv", "1\ta", "2\tb")), several)


def test_correlations_of_constants_are_zero() -> None:
    same, varied = np.ones(4), np.arange(4.0)
    assert spearman(same, varied) == pearson(varied, same) == 0.0
    assert spearman(varied, varied**3) == pytest.approx(1.0)
    assert pearson(varied, -varied) == pytest.approx(-1.0)


# Language models


def text(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_text_becomes_blocks(gpt2: ModelFolder, tmp_path: Path) -> None:
    path = text(tmp_path / "a.txt", "one two three", "", "four five six seven")
    data = open_data(Request(path, path, path, max_length=3), gpt2)
    assert ids(data.train) == [[15, 16, 17], [18, 19, 20]]  # what is left over, one token, predicts nothing
    batch = data.task.collate([data.train[0], {"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [5, 6]}])
    assert batch["labels"].tolist() == [[15, 16, 17], [5, 6, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_rows_of_a_column_end_with_the_end_token(tmp_path: Path) -> None:
    tokenizer = folders.tokenizer()
    tokenizer.eos_token = "[SEP]"
    path = folders.save(folders.gpt2(), tmp_path / "model", with_tokenizer=False)
    tokenizer.save_pretrained(path)
    rows = tsv(tmp_path / "a.tsv", "0\tone two", "1\tthree")
    data = open_data(Request(rows, rows, rows), load(path))
    assert ids(data.train) == [[15, 16, 3, 17, 3]]


def test_perplexity_is_that_of_the_models_own_loss(gpt2: ModelFolder, tmp_path: Path) -> None:
    path = text(tmp_path / "a.txt", *["one two three four five good bad"] * 11)
    data = open_data(Request(path, path, path, max_length=8), gpt2)
    found = statistics(data.task, data.eval, logits_of(gpt2), 3)
    assert found[:, 1].tolist() == [7.0] * 9 + [4.0]
    losses = []
    for row in data.eval:
        batch = data.task.collate([row])
        losses.append(gpt2.model(**batch).loss.item() * (len(row["input_ids"]) - 1))
    assert found[:, 0] == pytest.approx(losses, rel=1e-5)
    assert data.task.score(found) == pytest.approx(math.exp(sum(losses) / found[:, 1].sum()), rel=1e-5)
    assert not data.task.higher_is_better


def test_blocks_are_no_longer_than_the_model_takes(gpt2: ModelFolder, tmp_path: Path) -> None:
    path = text(tmp_path / "a.txt", *["one two three four five"] * 9)
    data = open_data(Request(path, path, path, max_length=999), gpt2)
    assert list(data.train["length"]) == [20, 20, 5]


def test_faults_of_text(gpt2: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds 1 token, nothing can be predicted"):
        open_data(Request(text(tmp_path / "a.txt", "one")), gpt2)
    with pytest.raises(InputError, match="blocks of 1 token predict nothing; raise --max-length"):
        open_data(Request(text(tmp_path / "a.txt", "one two"), max_length=1), gpt2)
    rows = tsv(tmp_path / "a.tsv", "one\ttwo", header="sentence1\tsentence2")
    with pytest.raises(InputError, match="language models read one column, not 2"):
        open_data(Request(rows), gpt2)


def test_perplexity_of_a_broken_model_is_infinite_not_an_error() -> None:
    assert perplexity(np.array([1e6]), np.array([2.0])) == math.inf


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 9)), min_size=1, max_size=9), st.randoms())
def test_a_resample_of_blocks_is_scored_as_its_text(blocks: list[tuple[float, int]], random: Any) -> None:
    kept = np.array(random.choices(blocks, k=len(blocks)))
    expected = sum(loss for loss, _ in kept) / sum(tokens for _, tokens in kept)
    assert math.log(perplexity(kept[:, 0], kept[:, 1])) == pytest.approx(expected)


# Real rows


@pytest.fixture(scope="module")
def sst2() -> tuple[ModelFolder, Data]:
    """The dev and test rows: the model is trained, and the 67 thousand rows that trained it take a while to encode."""
    if not (SST2.exists() and MINILM.exists()):
        pytest.skip("needs the data sets and models that lie beside the project")
    folder = load(MINILM)
    return folder, open_data(Request(None, str(SST2), str(SST2), max_length=64), folder)


def test_minilm_on_sst2(sst2: tuple[ModelFolder, Data]) -> None:
    folder, data = sst2
    assert [len(part) for part in (data.train, data.eval, data.test)] == [0, 706, 1_439]
    assert data.task.score(statistics(data.task, data.eval, logits_of(folder))) == pytest.approx(0.898, abs=5e-4)
