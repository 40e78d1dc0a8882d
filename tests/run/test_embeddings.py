"""A sentence encoder goes in, and one comes out that computes the pruned model's embeddings of raw texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
import torch
import transformers as hf

import compressor
from compressor.model_folder import load
from compressor.models.pooled_encoder import SentenceEncoder
from compressor.results import NoteCode, Report
from compressor.units import gated
from graph_passes import Plan
from tests import folders
from tests.run.runs import learn, learning_recipe
from tests.tasks.test_sentence_similarity import HEADER, pair_rows

TEXTS = ["good film", "the very bad plot", "one two three four five six seven eight nine ten at all not a the very bad"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with training rows without labels, and pairs with labels."""
    path = tmp_path_factory.mktemp("rows")
    (path / "train.tsv").write_text("\n".join(["text", *(row.split("\t")[1] for row in pair_rows(48)), ""]))
    (path / "test.tsv").write_text("\n".join([HEADER, *pair_rows(24, seed=1), ""]))
    return path


def run(rows: Path, model: Path, out: Path, **fields: Any) -> Report:
    defaults = {"model": model, "data": str(rows / "train.tsv"), "macs": "60%", "keep": None, "training_steps": None}
    test = str(rows / "test.tsv")
    return compressor.compress(
        learning_recipe(rows, out, **{**defaults, "eval_data": test, "test_data": test, **fields})
    )


def library_embeddings(folder: Path, pooling: str) -> np.ndarray:
    """Embeddings of `TEXTS` from `model.onnx`, after the modules that sentence-transformers runs on its output."""
    tokens = hf.AutoTokenizer.from_pretrained(folder)(
        TEXTS, padding=True, truncation=True, max_length=12, return_tensors="np"
    )
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (states,) = session.run(["last_hidden_state"], dict(tokens))
    mask = tokens["attention_mask"] if states.shape[1] == tokens["input_ids"].shape[1] else np.ones(states.shape[:2])
    pooled = states[:, 0] if pooling == "cls" else (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    for config in sorted(folder.glob("*_Dense/config.json")):
        weights = safetensors.numpy.load_file(config.with_name("model.safetensors"))
        pooled = np.tanh(pooled @ weights["linear.weight"].T + weights["linear.bias"])
    return np.asarray(pooled / np.linalg.norm(pooled, axis=1, keepdims=True))


def gated_embeddings(folder: Path, pooling: str) -> np.ndarray:
    """Embeddings of `TEXTS` from the weights of an output folder, with the dropped units switched off."""
    loaded = load(folder)
    assert isinstance(loaded.model, SentenceEncoder)
    tokens = loaded.processor(TEXTS, padding=True, truncation=True, max_length=12, return_tensors="pt")
    with torch.no_grad(), gated(loaded.model, Plan.load(folder / "plan.json")) as model:
        return np.asarray(model(**tokens).sentence_embedding)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_pooling_and_dense_layers_inside_the_graph(rows: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    lengths = {"max_seq_length": 12}
    model = folders.save_sentence_encoder(tmp_path / "model", dense=(24, 8), sentence_bert_config=lengths)
    out = tmp_path / "out"
    report = run(rows, model, out, match_dense=True)
    assert report.plan.neurons_kept + report.plan.heads_kept < report.plan.neurons + report.plan.heads
    assert (report.task, report.scores[0].metric) == ("sentence-similarity", "spearman")
    assert all(proof.holds for proof in report.proofs)
    codes = {note.code for note in report.notes}
    assert {NoteCode.ROWS_UNLABELLED, NoteCode.EMBEDDINGS_CHANGED} <= codes
    assert NoteCode.POSITIONS_DROPPED not in codes
    assert report.embeddings is not None
    assert report.embeddings.texts == 48
    assert report.embeddings.cosine < 1
    assert json.loads((out / "modules.json").read_text()) == json.loads((model / "modules.json").read_text())
    embeddings = library_embeddings(out, "mean")
    assert embeddings.shape[1] == 8
    assert embeddings == pytest.approx(gated_embeddings(out, "mean"), abs=1e-5)
    assert abs(embeddings - dense_embeddings(model)).max() > 1e-4


def dense_embeddings(model: Path) -> np.ndarray:
    """Embeddings of `TEXTS` from the dense model."""
    loaded = load(model)
    tokens = loaded.processor(TEXTS, padding=True, truncation=True, max_length=12, return_tensors="pt")
    with torch.no_grad():
        return np.asarray(loaded.model(**tokens).sentence_embedding)


@pytest.mark.zoo
@pytest.mark.usefixtures("cache")
def test_pooling_outside_of_the_graph(rows: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = folders.save_sentence_encoder(tmp_path / "model", pooling="cls")
    out = tmp_path / "out"
    report = run(rows, model, out, pool_in_graph=False, target="openvino", metric="pearson")
    assert NoteCode.POSITIONS_DROPPED not in {note.code for note in report.notes}, "all states are outputs"
    assert report.scores[0].metric == "pearson"
    assert (out / "openvino" / "openvino_model.xml").read_bytes() == (out / "engine.xml").read_bytes()
    assert library_embeddings(out, "cls") == pytest.approx(gated_embeddings(out, "cls"), abs=1e-5)


@pytest.mark.zoo
def test_heads_are_learned_from_labels_and_trained_without(rows: Path, tmp_path: Path) -> None:
    model = folders.save_sentence_encoder(tmp_path / "model")
    pairs = dict.fromkeys(("data", "eval_data", "test_data"), str(rows / "test.tsv"))
    fields = {"model": model, **pairs, "metric": "ndcg@10", "distill": True, "distill_steps": 4}
    learned = learn(learning_recipe(rows, tmp_path / "out", **fields))
    assert learned.selected.plan.heads_kept == 1
    assert learned.codes & {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN}
    assert NoteCode.OUTPUTS_NOT_KEPT not in learned.codes
