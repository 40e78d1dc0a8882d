"""Models that search their ids, and models of sounds and images, become engines, from a run and from its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

import compressor
from compressor.config.run import Recipe
from compressor.errors import ErrorCode
from compressor.model_folder import load
from compressor.results import NoteCode, Report
from compressor.run.finished_run import load_run
from compressor.run.rebuild import rebuild
from compressor.targets import target
from compressor.targets.example_rows import EXAMPLE_ROWS, read_example_rows
from graph_passes import load as load_graph
from graph_passes import save
from tests import end_token_models, folders
from tests.end_token_models import ANSWERER, MODELS
from tests.faults import fails_with
from tests.run.listeners import RecordingListener

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
_UNEXPORTED = ("led", "longformer")
"""Families that torch.export cannot trace: their local attention branches on the data."""
EXPORTED = [name for name, (family, _) in MODELS.items() if family not in _UNEXPORTED]


def recipe(folder: Path, runtime: str, **fields: Any) -> Recipe:
    sizes = {"batch": (2,), "seconds": 0.01, "threads": 1}
    return Recipe(model=folder / "model", out=folder / "out", target=runtime, save_dense=True, **sizes, **fields)


def assert_proven(report: Report, runtime: str) -> None:
    assert report.target == runtime
    assert report.speeds
    assert all(proof.holds for proof in report.proofs)
    assert NoteCode.RANDOM_INPUTS not in {note.code for note in report.notes}


def prove_run(name: str, folder: Path, runtime: str) -> None:
    """A run, builds of its folder for both runtimes, and its engine against PyTorch on texts and pairs of texts."""
    end_token_models.save(name, folder / "model")
    assert_proven(compressor.compress(recipe(folder, runtime, seq=(9,))), runtime)
    model = load(folder / "model")
    pair = MODELS[name][1] == ANSWERER
    texts = (["word1 word2", "word3 word4 word5"], ["word6", "word7 word8 word9"])
    rows = [texts] if pair else [texts[:1], texts]
    for each in ("openvino", "ort"):
        assert_proven(
            rebuild(folder / "out", {"target": each, "seconds": 0.01, "threads": 1}, RecordingListener()), each
        )
        engine = target(each).load(folder / "out" / target(each).engine_file, threads=1)
        for columns in rows:
            batch = model.processor(*columns, padding=True, return_tensors="pt")
            outputs = engine.run({key: value.numpy() for key, value in batch.items()})
            with torch.no_grad():
                expected = model.model(**batch)
            for output, computed in outputs.items():
                np.testing.assert_allclose(computed, expected[output].numpy(), rtol=1e-3, atol=1e-3)


def test_a_classifier_that_reads_its_end_token_becomes_an_engine(tmp_path: Path) -> None:
    """mBART's rows end with a language behind the end token, and its decoder begins with the language."""
    prove_run("mbart classifier", tmp_path, "ort")
    graph = load_graph(tmp_path / "out" / "model.onnx")
    example = read_example_rows(graph)
    assert example is not None
    cases = load_run(tmp_path / "out", {}).cases
    assert {int((row == 2).sum()) for case in cases for row in case.feeds["input_ids"]} == {1}
    del graph.metadata_props[EXAMPLE_ROWS]
    save(graph, tmp_path / "bare.onnx")
    with fails_with(ErrorCode.RUNTIME_FAILED, path=tmp_path / "bare.onnx"):
        target("ort").build(tmp_path / "bare.onnx", tmp_path / "engine.onnx")


@pytest.mark.zoo
@pytest.mark.parametrize("runtime", ["ort", "openvino"])
@pytest.mark.parametrize("name", [name for name in EXPORTED if name != "mbart classifier"])
def test_models_that_search_their_ids_become_engines(name: str, runtime: str, tmp_path: Path) -> None:
    prove_run(name, tmp_path, runtime)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name, (family, _) in MODELS.items() if family in _UNEXPORTED])
def test_families_that_cannot_be_exported_are_refused(name: str, tmp_path: Path) -> None:
    end_token_models.save(name, tmp_path / "model")
    with fails_with(ErrorCode.EXPORT_FAILED):
        compressor.compress(recipe(tmp_path, "ort", seq=(9,)))


def wav2vec2() -> PreTrainedModel:
    convolutions = {"conv_dim": (8, 8, 8), "conv_kernel": (10, 8, 4), "conv_stride": (5, 4, 2)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3}
    return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SIZES, **convolutions, **positions, vocab_size=12))


def spectrogram() -> PreTrainedModel:
    return hf.ASTForAudioClassification(hf.ASTConfig(**SIZES, patch_size=4, max_length=32, num_mel_bins=16))


def dinov2() -> PreTrainedModel:
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    return hf.Dinov2Model(hf.Dinov2Config(**sizes, mlp_ratio=2, image_size=28, patch_size=14))


def patches() -> PreTrainedModel:
    return hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**SIZES, patch_size=4, num_patches=16))


def places() -> PreTrainedModel:
    vision = {**SIZES, "image_size": 12, "patch_size": 4}
    text = {"embed_dim": 16, "layers": 1, "ffn_dim": 20, "attention_heads": 2, "max_position_embeddings": 80}
    return hf.Kosmos2Model(
        hf.Kosmos2Config(text_config={"vocab_size": 99, **text}, vision_config=vision, latent_query_num=3)
    )


SIGNALS: dict[str, Callable[[], PreTrainedModel]] = {
    "sound": wav2vec2,
    "spectrogram": spectrogram,
    "image": dinov2,
    "patches of images": patches,
    "images in a text": places,
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", SIGNALS)
def test_models_of_sounds_and_images_become_engines(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folders.save(SIGNALS[name]().eval(), tmp_path / "model", with_tokenizer=name == "images in a text")
    assert_proven(compressor.compress(recipe(tmp_path, "ort")), "ort")
    for each in ("openvino", "ort"):
        report = rebuild(tmp_path / "out", {"target": each, "seconds": 0.01, "threads": 1}, RecordingListener())
        assert_proven(report, each)


def test_a_build_says_that_ids_are_random(tmp_path: Path) -> None:
    """A folder of a run whose graph carries no rows."""
    torch.manual_seed(0)
    folders.save(folders.bert(), tmp_path / "model")
    out = tmp_path / "out"
    compressor.compress(recipe(tmp_path, "ort", seq=(8,)))
    model = load_graph(out / "model.onnx")
    del model.metadata_props[EXAMPLE_ROWS]
    save(model, out / "model.onnx")
    report = compressor.report.load(out)
    compressor.report.write(report.model_copy(update={"graphs": {}}), out)
    built = rebuild(out, {"seconds": 0.01, "threads": 1}, RecordingListener())
    assert NoteCode.RANDOM_INPUTS in {note.code for note in built.notes}
