"""Pooling, and sentence encoders: their outputs, their loss, what they save, and the positions that graphs compute."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from compressor.model_folder import ModelFolder, example_inputs, load
from compressor.models.pooled_encoder import POOLINGS, SentenceEncoder, _ranking_loss
from compressor.silence_libraries import quiet_tools
from compressor.units import find_sites, keep_all
from graph_passes import load as load_graph
from graph_passes import shrink
from graph_passes.passes import DropUnreadPositions
from tests import folders
from tests.shared_exports import shared_export

STATES = torch.tensor([[[1.0, -1.0], [3.0, -5.0], [9.0, 9.0]], [[2.0, 4.0], [4.0, 0.0], [0.0, -4.0]]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cls", [[1, -1], [2, 4]]),
        ("lasttoken", [[3, -5], [0, -4]]),
        ("max", [[3, -1], [4, 4]]),
        ("mean", [[2, -3], [2, 0]]),
        ("mean_sqrt_len_tokens", [[4 / math.sqrt(2), -6 / math.sqrt(2)], [6 / math.sqrt(3), 0]]),
    ],
)
def test_values(name: str, expected: list[list[float]]) -> None:
    assert torch.allclose(POOLINGS[name](STATES, MASK), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("name", POOLINGS)
def test_padding_has_no_influence(name: str) -> None:
    padded, mask = nn.functional.pad(STATES, (0, 0, 0, 2), value=100.0), nn.functional.pad(MASK, (0, 2))
    assert torch.allclose(POOLINGS[name](padded, mask), POOLINGS[name](STATES, MASK))


@pytest.mark.parametrize("name", POOLINGS)
def test_a_single_state_is_its_own_embedding(name: str) -> None:
    state = torch.randn(3, 1, 4)
    assert torch.allclose(POOLINGS[name](state, torch.ones(3, 1)), state[:, 0])


class AllPoolings(nn.Module):
    """Every pooling of the same states."""

    def forward(self, states: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {name: pool(states, mask) for name, pool in POOLINGS.items()}


@pytest.mark.zoo
def test_a_graph_computes_the_same_at_other_sizes(tmp_path: Path) -> None:
    axes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("positions")}
    with quiet_tools():
        program = torch.onnx.export(
            AllPoolings(), (STATES, MASK), dynamo=True, dynamic_shapes={"states": axes, "mask": axes}, verbose=False
        )
    assert program is not None
    program.save(tmp_path / "pooling.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "pooling.onnx", providers=["CPUExecutionProvider"])
    states, mask = torch.randn(4, 7, 2), (torch.arange(7) < torch.tensor([[7], [1], [4], [6]])).long()
    outputs = session.run(None, {"states": states.numpy(), "mask": mask.numpy()})
    for output, pool in zip(outputs, POOLINGS.values(), strict=True):
        assert np.allclose(output, pool(states, mask), atol=1e-6)


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
    pooled = model.pool(output.last_hidden_state.detach().numpy(), inputs["attention_mask"].numpy())
    assert np.allclose(pooled, output.sentence_embedding.detach())
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


@pytest.mark.zoo
@pytest.mark.parametrize(("pooling", "drops"), [("cls", True), ("mean", False)])
def test_positions_are_dropped_only_where_the_first_is_pooled(pooling: str, drops: bool, tmp_path: Path) -> None:
    folder = load(folders.save_sentence_encoder(tmp_path / "encoder", pooling=pooling))
    inputs = example_inputs(folder, 2, 8)
    plan = keep_all(find_sites(folder.model, inputs, attention="eager"))
    shared_export(folder.model, plan, inputs, tmp_path / "graph.onnx")
    graph = shrink(load_graph(tmp_path / "graph.onnx"), plan).model
    assert [value.name for value in graph.graph.outputs] == ["sentence_embedding", "last_hidden_state"]
    assert bool(DropUnreadPositions()(graph).report) is drops
