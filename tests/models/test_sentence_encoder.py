"""A sentence encoder: its outputs, its loss, what it saves, and the positions that its graph computes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers as hf

from compressor.model_folder import ModelFolder, example_inputs, load
from compressor.models.sentence_encoder import SentenceEncoder, _ranking_loss
from compressor.units import find_sites, keep_all
from graph_passes import load as load_graph
from graph_passes import shrink
from graph_passes.passes import DropUnreadPositions
from tests import folders
from tests.shared_exports import shared_export


def encoder(folder: ModelFolder) -> SentenceEncoder:
    assert isinstance(folder.model, SentenceEncoder)
    return folder.model


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    """A sentence encoder with mean pooling."""
    torch.manual_seed(0)
    return load(folders.save_sentence_encoder(tmp_path / "encoder"))


def test_embeddings_are_pooled_states_of_norm_one(folder: ModelFolder) -> None:
    model, inputs = encoder(folder), example_inputs(folder, 3, 6)
    with torch.no_grad():
        output, states = model(**inputs), model.encoder(**inputs)[0]
    mask = inputs["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    assert torch.allclose(output.sentence_embedding, mean / mean.norm(dim=-1, keepdim=True), atol=1e-6)
    assert torch.allclose(output.last_hidden_state, mean[:, None], atol=1e-6)
    assert (output.loss, output.document_scores, output.hidden_states) == (None, None, None)


def test_pooling_outside_returns_the_states(tmp_path: Path) -> None:
    folder = load(folders.save_sentence_encoder(tmp_path / "encoder"), pool_in_graph=False)
    model, inputs = encoder(folder), example_inputs(folder, 3, 6)
    output = model(**inputs)
    assert output.last_hidden_state.shape == (3, 6, 16)
    assert torch.allclose(model.pool(output.last_hidden_state, inputs["attention_mask"]), output.sentence_embedding)
    assert model.graph_outputs == ("last_hidden_state",)


def test_documents_are_ranked_by_cosine(folder: ModelFolder) -> None:
    model, inputs = encoder(folder), example_inputs(folder, 3, 6)
    with torch.no_grad():
        model.documents = model(**inputs).sentence_embedding
        scores = model(**inputs).document_scores
    assert torch.allclose(scores.diagonal(), torch.full((3,), 20.0), atol=1e-4)
    assert scores.argmax(1).tolist() == [0, 1, 2]


def test_the_loss_orders_pairs_by_their_labels() -> None:
    same, opposite = [[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]]
    pairs = torch.tensor([*same, *opposite])
    assert _ranking_loss(pairs, torch.tensor([5.0, 1.0])).item() == pytest.approx(0, abs=1e-6)
    assert _ranking_loss(pairs, torch.tensor([1.0, 5.0])).item() == pytest.approx(40)
    assert _ranking_loss(torch.tensor([*same, *same]), torch.tensor([0.0, 1.0])).item() == pytest.approx(math.log(2))
    assert _ranking_loss(pairs, torch.tensor([1.0, 1.0])).item() == pytest.approx(0)


def test_the_encoder_alone_is_saved(folder: ModelFolder, tmp_path: Path) -> None:
    model = encoder(folder)
    model.save_pretrained(tmp_path / "saved")
    saved = hf.AutoModel.from_pretrained(tmp_path / "saved", add_pooling_layer=False)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in model.encoder.state_dict().items())


@pytest.mark.parametrize(("pooling", "drops"), [("cls", True), ("mean", False)])
def test_positions_are_dropped_only_where_the_first_is_pooled(pooling: str, drops: bool, tmp_path: Path) -> None:
    folder = load(folders.save_sentence_encoder(tmp_path / "encoder", pooling=pooling))
    inputs = example_inputs(folder, 2, 8)
    plan = keep_all(find_sites(folder.model, inputs, attention="eager"))
    shared_export(folder.model, plan, inputs, tmp_path / "graph.onnx")
    graph = shrink(load_graph(tmp_path / "graph.onnx"), plan).model
    assert [value.name for value in graph.graph.outputs] == ["sentence_embedding", "last_hidden_state"]
    assert bool(DropUnreadPositions()(graph).report) is drops
