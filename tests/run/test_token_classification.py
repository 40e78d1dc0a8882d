"""A tagger goes in, and a pruned one comes out whose engine tags raw texts as transformers' pipeline does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import pipeline

import compressor
from compressor.model_folder import load
from compressor.models.forwards import tensors_of
from compressor.results import NoteCode, Report
from compressor.targets import target
from compressor.tasks import open_data
from compressor.units import gated
from graph_passes import Plan
from tests.folders import rows_config
from tests.run.runs import learn, learning_recipe
from tests.tasks.questions import wordpieces
from tests.tasks.tags import bert, conll, sentence

TEXTS = ["who built paris rome", "the xy of 1889 , rome", "river"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of rows and of a BERT that learned to tag them."""
    path = tmp_path_factory.mktemp("tags")
    rows = conll(path / "rows.conll", *(sentence(seed) for seed in range(64)))
    torch.manual_seed(0)
    bert().save_pretrained(path / "model")
    wordpieces().save_pretrained(path / "model")
    folder = load(path / "model")
    data = open_data(rows_config(rows, rows, rows), folder)
    batch = tensors_of(data.task.loss_inputs(data.task.collate(list(data.train))))
    optimizer = torch.optim.Adam(folder.model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        folder.model(**batch).loss.backward()
        optimizer.step()
    folder.model.save_pretrained(path / "model")
    return path


def run(trained: Path, out: Path, **fields: Any) -> Report:
    rows = str(trained / "rows.conll")
    defaults = {"keep": None, "training_steps": None, "macs": "70%", "data": rows, "eval_data": rows, "test_data": rows}
    return compressor.compress(learning_recipe(trained, out, **{**defaults, **fields}))


@pytest.mark.zoo
def test_the_report_compares_f1_on_the_engines(trained: Path, tmp_path: Path) -> None:
    report = run(trained, tmp_path / "out", max_length=16)
    (score,) = report.scores
    assert (report.task, score.metric, score.rows) == ("token-classification", "f1", 64)
    assert score.dense > 0.9
    assert score.low <= score.compressed - score.dense <= score.high
    assert report.plan.heads_kept + report.plan.neurons_kept < report.plan.heads + report.plan.neurons
    assert all(proof.holds for proof in report.proofs)
    assert NoteCode.METRIC_SETTINGS in {note.code for note in report.notes}
    assert report.answers
    for row in report.answers:
        (words,) = row.texts
        for text in (row.expected, row.dense, row.compressed):
            assert all(
                span in words and kind in ("LOC", "NUM") for span, kind in re.findall(r"([^;]+) \((.+?)\)", text)
            )
    assert any("(LOC)" in row.expected for row in report.answers)
    assert_equal_to_the_pipeline(tmp_path / "out")


def assert_equal_to_the_pipeline(out: Path) -> None:
    """Compare the probabilities of the engine with those of the pipeline, on the pruned model's weights."""
    folder = load(out)
    names: dict[Any, str] = dict(folder.config.id2label or {})
    engine = target("ort").load(out / "engine.onnx")
    with gated(folder.model, Plan.load(out / "plan.json")) as model:
        tagger = pipeline("token-classification", model=model, tokenizer=folder.processor, ignore_labels=[])
        answers = tagger(TEXTS)
    tokens = folder.processor(TEXTS, padding=True, return_tensors="np", return_special_tokens_mask=True)
    special = tokens.pop("special_tokens_mask")
    logits = torch.from_numpy(engine.run(dict(tokens))["logits"])
    probabilities = logits.softmax(-1).numpy()
    for row, (answer, tags) in enumerate(zip(answers, probabilities, strict=True)):
        scored = tags[special[row] == 0]
        assert [token["entity"] for token in answer] == [names[index] for index in scored.argmax(-1)]
        assert np.array([token["score"] for token in answer]) == pytest.approx(scored.max(-1), abs=1e-4)


@pytest.mark.zoo
@pytest.mark.parametrize("rows", ["words.jsonl", "texts.txt"])
def test_rows_without_tags_are_enough_to_prune_and_distill(rows: str, trained: Path, tmp_path: Path) -> None:
    sentences = [sentence(seed)["words"] for seed in range(100, 132)]
    as_text = rows == "texts.txt"
    lines = [" ".join(words) if as_text else json.dumps({"words": words}) for words in sentences]
    (tmp_path / rows).write_text("\n".join(lines) + "\n")
    labelled = str(trained / "rows.conll")
    fields = {"data": str(tmp_path / rows), "eval_data": labelled, "test_data": labelled, "metric": "accuracy"}
    budget = {"keep": None, "training_steps": None, "macs": "70%"}
    learned = learn(
        learning_recipe(trained, tmp_path / "out", **fields, **budget, distill=True, distill_steps=4, max_length=16)
    )
    assert NoteCode.ROWS_UNLABELLED in learned.codes
    assert learned.codes & {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN}


@pytest.mark.zoo
def test_heads_are_learned_from_tags(trained: Path, tmp_path: Path) -> None:
    rows = str(trained / "rows.conll")
    learned = learn(learning_recipe(trained, tmp_path / "out", data=rows, eval_data=rows, test_data=rows))
    assert learned.selected.plan.heads_kept == 1
