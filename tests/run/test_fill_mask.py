"""A model that fills masks goes in, and one comes out whose engine fills those of raw texts as the pipeline does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import pipeline

import compressor
from compressor.model_folder import load
from compressor.results import NoteCode
from compressor.targets import target
from compressor.units import gated
from graph_passes import Plan
from tests import folders
from tests.folders import SIZES, WORDS
from tests.run.runs import learn, learning_recipe

TEXTS = ["good [MASK]", "the [MASK] bad plot of one film", "[MASK]"]
MASK = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and plain text."""
    path = tmp_path_factory.mktemp("masks")
    torch.manual_seed(0)
    folders.save(hf.BertForMaskedLM(hf.BertConfig(**SIZES)), path / "model")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, int(rng.integers(2, 8)))) for _ in range(64)]
    (path / "rows.txt").write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.zoo
def test_masks_are_filled_as_the_pipeline_does(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fields = {"data": str(inputs / "rows.txt"), "keep": None, "training_steps": None, "macs": "80%"}
    report = compressor.compress(learning_recipe(inputs, out, metric="pseudo_perplexity", **fields))
    (score,) = report.scores
    assert (report.task, score.metric, score.higher_is_better) == ("fill-mask", "pseudo_perplexity", False)
    assert report.plan.heads_kept + report.plan.neurons_kept < report.plan.heads + report.plan.neurons
    assert all(proof.holds for proof in report.proofs)
    assert report.answers
    for row in report.answers:
        assert len({len(tokens.split()) for tokens in (row.expected, row.dense, row.compressed)}) == 1
    folder = load(out)
    engine = target("ort").load(out / "engine.onnx")
    with gated(folder.model, Plan.load(out / "plan.json")) as model:
        answers = pipeline("fill-mask", model=model, tokenizer=folder.processor, top_k=25)(TEXTS)
    for text, answer in zip(TEXTS, answers, strict=True):
        tokens = dict(folder.processor(text, return_tensors="np"))
        (position,) = np.flatnonzero(tokens["input_ids"][0] == MASK)
        probabilities = torch.from_numpy(engine.run(tokens)["logits"])[0, position].softmax(-1).numpy()
        scores = {proposal["token"]: proposal["score"] for proposal in answer}
        assert np.array([scores[token] for token in range(25)]) == pytest.approx(probabilities, abs=1e-4)


@pytest.mark.zoo
def test_a_model_is_trained_on_the_answers_at_masked_tokens(inputs: Path, tmp_path: Path) -> None:
    fields = {"data": str(inputs / "rows.txt"), "distill": True, "distill_steps": 4}
    learned = learn(learning_recipe(inputs, tmp_path / "out", **fields))
    assert learned.selected.plan.heads_kept == 1
    assert learned.codes & {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN}
