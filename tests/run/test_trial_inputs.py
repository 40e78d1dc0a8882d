"""Models that search their ids, and models of sounds and images, become engines, from a run and from its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

import compressor
from compressor.config.run import Recipe
from compressor.config.sections import ExportConfig
from compressor.engines.export import export_unproven
from compressor.errors import ErrorCode
from compressor.model_folder import ModelFolder, example_inputs, load
from compressor.results import NoteCode, Report
from compressor.run.rebuild import rebuild
from compressor.targets import Engine, target
from compressor.targets.example_rows import read_example_rows
from compressor.units import find_sites, keep_all
from graph_passes import load as load_graph
from tests import end_token_models, folders
from tests.end_token_models import ANSWERER, MODELS
from tests.faults import fails_with
from tests.run.listeners import RecordingListener

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
TEXTS = (["word1 word2", "word3 word4 word5"], ["word6", "word7 word8 word9"])
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


def assert_equal(engine: Engine, folder: ModelFolder, rows: Sequence[Sequence[list[str]]]) -> None:
    """Compare an engine with PyTorch on texts as the tokenizer encodes them."""
    for columns in rows:
        batch = folder.processor(*columns, padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = folder.model(**batch)
        for name, computed in engine.run({key: value.numpy() for key, value in batch.items()}).items():
            np.testing.assert_allclose(computed, expected[name].numpy(), rtol=1e-3, atol=1e-3)


def prove_run(name: str, folder: Path, runtime: str) -> None:
    """A run, builds of its folder for both runtimes, and its engine against PyTorch on texts and pairs of texts."""
    end_token_models.save(name, folder / "model")
    assert_proven(compressor.compress(recipe(folder, runtime, seq=(9,))), runtime)
    model = load(folder / "model")
    rows = (TEXTS,) if MODELS[name][1] == ANSWERER else ([TEXTS[0]], TEXTS)
    for each in ("openvino", "ort"):
        assert_proven(
            rebuild(folder / "out", {"target": each, "seconds": 0.01, "threads": 1}, RecordingListener()), each
        )
        assert_equal(target(each).load(folder / "out" / target(each).engine_file, threads=1), model, rows)


@pytest.mark.zoo
def test_a_classifier_that_reads_its_end_token_becomes_an_engine(tmp_path: Path) -> None:
    """mBART's rows end with a language behind the end token, and its decoder begins with the language."""
    folder = load(end_token_models.save("mbart classifier", tmp_path / "model"))
    plan, path = keep_all(find_sites(folder.model, example_inputs(folder, 2, 8))), tmp_path / "model.onnx"
    export_unproven(folder, plan, ExportConfig(), path)
    example = read_example_rows(load_graph(path))
    assert example is not None
    assert (example.inputs["input_ids"] == 2).sum(1).tolist() == [1] * len(example.inputs["input_ids"])
    assert_equal(target("ort").build(path, tmp_path / "engine.onnx", threads=1), folder, ([TEXTS[0]], TEXTS))


@pytest.mark.zoo
@pytest.mark.parametrize("runtime", ["ort", "openvino"])
@pytest.mark.parametrize("name", EXPORTED)
def test_models_that_search_their_ids_become_engines(name: str, runtime: str, tmp_path: Path) -> None:
    prove_run(name, tmp_path, runtime)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name, (family, _) in MODELS.items() if family in _UNEXPORTED])
def test_families_that_cannot_be_exported_are_refused(name: str, tmp_path: Path) -> None:
    end_token_models.save(name, tmp_path / "model")
    with fails_with(ErrorCode.EXPORT_FAILED):
        compressor.compress(recipe(tmp_path, "ort", seq=(9,)))


def wav2vec2() -> PreTrainedModel:
    convolutions: dict[str, Any] = {"conv_dim": (8, 8, 8), "conv_kernel": (10, 8, 4), "conv_stride": (5, 4, 2)}
    positions: dict[str, Any] = {
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "num_feat_extract_layers": 3,
    }
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
