"""A classifier of several classes a row is quantized by texts without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compressor
from compressor.model_folder import load
from compressor.results import NoteCode
from compressor.targets import target
from tests import folders
from tests.quantization.graphs import needs_nncf
from tests.run.runs import learning_recipe
from tests.tasks.rows import text

pytestmark = needs_nncf


@pytest.mark.zoo
def test_texts_without_labels_quantize_it_and_tell_how_many_answers_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config: dict[str, Any] = {"problem_type": "multi_label_classification", "num_labels": 5, "initializer_range": 0.5}
    model = folders.save(folders.bert(**config), tmp_path / "model")
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(folders.WORDS, 5)) for _ in range(80)]
    rows = text(tmp_path / "texts.txt", *texts)
    report = compressor.compress(
        learning_recipe(
            tmp_path,
            tmp_path / "out",
            keep="100%",
            training_steps=None,
            data=rows,
            target="ort",
            precision="int8",
            allow_float_products=True,
        )
    )
    assert (report.task, report.precision, report.scores) == ("multi-label-classification", "int8", ())
    assert NoteCode.ROWS_UNLABELLED in {note.code for note in report.notes}
    assert all(proof.holds for proof in report.proofs)
    assert report.compressed.quantized is not None

    folder, engine = load(model), target("ort").load(tmp_path / "out" / "engine.onnx")
    encoded = folder.processor(texts[50:], return_tensors="pt")  # one batch, as in the run
    with torch.no_grad():
        whole = folder.model(**encoded).logits.numpy()
    logits = engine.run({name: value.numpy() for name, value in encoded.items()})["logits"]
    assert np.abs(logits - whole).max() < np.abs(whole).max() / 2
    (chosen,) = (row for row in report.candidates if row.chosen)
    assert (chosen.metric, chosen.difference) == (None, None)
    assert chosen.agreement is not None
    assert 0.5 < chosen.agreement <= 1
