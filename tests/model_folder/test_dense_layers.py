"""Dense layers of sentence encoders: what they compute, what a run does with them, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor import find_groups
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import example_inputs, load, save_companions
from compressor.model_folder.sentence_modules import load_dense_layer
from compressor.models.pooled_encoder import ACTIVATIONS, SentenceEncoder
from compressor.run.steps.distill import require_same_interface
from compressor.training.distillation import Distillation
from tests import folders
from tests.faults import fails_with

STATES, WIDTH = 16, 6
"""The width of the states of the encoder, and that of its embeddings."""


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A folder with two dense layers between pooling and normalisation."""
    torch.manual_seed(0)
    return folders.save_sentence_encoder(tmp_path / "encoder", dense=(24, WIDTH))


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """The folder of one dense layer."""
    folders.save_dense_layer(tmp_path / "2_Dense", STATES, WIDTH)
    return tmp_path / "2_Dense"


def write_weights(layer: Path, **tensors: Tensor) -> None:
    safetensors.torch.save_file(
        {f"linear.{name}": tensor for name, tensor in tensors.items()}, layer / "model.safetensors"
    )


def set_keys(layer: Path, **keys: Any) -> None:
    config = json.loads((layer / "config.json").read_text())
    (layer / "config.json").write_text(json.dumps({**config, **keys}))


def pickle_weights(layer: Path) -> None:
    file = layer / "model.safetensors"
    torch.save(safetensors.torch.load_file(file), layer / "pytorch_model.bin")
    file.unlink()


def test_embeddings_pass_the_layers_in_order(encoder: Path) -> None:
    folder = load(encoder)
    assert folder.sentence is not None
    assert folder.sentence.dense == ("2_Dense", "3_Dense")
    assert isinstance(folder.model, SentenceEncoder)
    with torch.no_grad():
        output = folder.model(**example_inputs(folder, 3, 6))
        assert output.last_hidden_state.shape == (3, 1, STATES)
        expected = output.last_hidden_state[:, 0]
        for path in folder.sentence.dense:
            weights = safetensors.torch.load_file(encoder / path / "model.safetensors")
            expected = torch.tanh(expected @ weights["linear.weight"].T + weights["linear.bias"])
    expected = expected / expected.norm(dim=-1, keepdim=True)
    assert torch.allclose(output.sentence_embedding, expected, atol=1e-6)


def test_the_layers_follow_pooling_outside_of_the_graph(encoder: Path) -> None:
    folder = load(encoder, pool_in_graph=False)
    assert isinstance(folder.model, SentenceEncoder)
    inputs = example_inputs(folder, 3, 6)
    with torch.no_grad():
        output = folder.model(**inputs)
        pooled = folder.model.pool(output.last_hidden_state.numpy(), inputs["attention_mask"].numpy())
    assert output.last_hidden_state.shape == (3, 6, STATES)
    assert np.array_equal(pooled, output.sentence_embedding)


def test_a_teacher_has_embeddings_of_the_same_width(encoder: Path, tmp_path: Path) -> None:
    wide = load(folders.save_sentence_encoder(tmp_path / "wide", dense=(WIDTH + 1,)))
    same = load(folders.save_sentence_encoder(tmp_path / "same", dense=(WIDTH,)))
    require_same_interface(same, load(encoder), compares_hidden=True)
    for teacher in (wide, load(folders.save_sentence_encoder(tmp_path / "without"))):
        with fails_with(ErrorCode.FILE_MISMATCH, field="teacher", path=teacher.path):
            require_same_interface(teacher, load(encoder), compares_hidden=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_named_by_its_class(name: str, layer: Path) -> None:
    set_keys(layer, activation_function=f"torch.nn.modules.activation.{name}", bias=False)
    weight = torch.randn(WIDTH, STATES)
    write_weights(layer, weight=weight)
    loaded = load_dense_layer(layer, STATES, allow_pickle=False)
    states = torch.randn(3, STATES)
    assert torch.allclose(loaded(states), getattr(torch.nn, name)()(states @ weight.T), atol=1e-5)


def test_the_layers_are_neither_pruned_nor_trained(encoder: Path, tmp_path: Path) -> None:
    with_layers, without = load(encoder), load(folders.save_sentence_encoder(tmp_path / "without"))
    names = [
        [group.name for group in find_groups(folder.model, example_inputs(folder, 2, 8))]
        for folder in (with_layers, without)
    ]
    assert names[0] == names[1]
    assert {name for name, _ in with_layers.model.named_parameters()} == {
        name for name, _ in without.model.named_parameters()
    }


def test_weights_and_activations_are_part_of_what_a_model_computes(encoder: Path) -> None:
    before = load(encoder)
    set_keys(encoder / "3_Dense", activation_function="torch.nn.modules.linear.Identity")
    activation = load(encoder)
    assert activation.fingerprint == before.fingerprint
    assert activation.surroundings != before.surroundings
    first, second = (Distillation.of(folder.model, ("sentence_embedding",)).settings for folder in (before, activation))
    assert first != second, "outputs of a teacher that are kept"
    folders.save_dense_layer(encoder / "2_Dense", STATES, 24)
    assert load(encoder).fingerprint != before.fingerprint


def test_the_output_folder_has_the_layers(encoder: Path, tmp_path: Path) -> None:
    before, out = load(encoder), tmp_path / "out"
    pickle_weights(encoder / "2_Dense")
    with fails_with(ErrorCode.UNSAFE_CODE, path=encoder / "2_Dense" / "pytorch_model.bin", field="allow_pickle"):
        load(encoder)
    save_companions(load(encoder, allow_pickle=True), out)
    (out / "model.safetensors").write_bytes((encoder / "model.safetensors").read_bytes())
    assert load(out).fingerprint == before.fingerprint


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softmax"}, ErrorCode.UNSUPPORTED_MODEL),
        ({"activation_function": "os.system"}, ErrorCode.UNSUPPORTED_MODEL),
        ({"activation_function": "layers.Tanh"}, ErrorCode.UNSUPPORTED_MODEL),
        ({"activation_function": "Tanh"}, ErrorCode.UNSUPPORTED_MODEL),
        ({"activation_function": 5}, ErrorCode.FILE_UNREADABLE),
        ({"activation_function": None}, ErrorCode.FILE_UNREADABLE),
        ({"module_input_name": "token_embeddings"}, ErrorCode.UNSUPPORTED_MODEL),
        ({"module_output_name": "token_embeddings"}, ErrorCode.UNSUPPORTED_MODEL),
    ],
    ids=str,
)
def test_other_layers_are_refused(keys: dict[str, object], code: ErrorCode, encoder: Path) -> None:
    set_keys(encoder / "3_Dense", **keys)
    ((name, value),) = keys.items()
    with fails_with(code, path=encoder / "3_Dense" / "config.json", field=name, value=value):
        load(encoder)


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": torch.ones(WIDTH, STATES + 1)},
        {"weight": torch.ones(WIDTH)},
        {"bias": torch.ones(WIDTH)},
        {"weight": torch.ones(WIDTH, STATES), "bias": torch.ones(WIDTH + 1)},
        {"weight": torch.ones(WIDTH, STATES), "scale": torch.ones(WIDTH)},
        {},
    ],
    ids=lambda tensors: " ".join(f"{name}{list(tensor.shape)}" for name, tensor in tensors.items()) or "none",
)
def test_other_weights_are_refused(tensors: dict[str, Tensor], layer: Path) -> None:
    write_weights(layer, **tensors)
    with fails_with(ErrorCode.FILE_MISMATCH, path=layer):
        load_dense_layer(layer, STATES, allow_pickle=False)


@pytest.mark.parametrize("pickled", [False, True])
def test_damaged_weights_are_refused(pickled: bool, layer: Path) -> None:
    if pickled:
        pickle_weights(layer)
    file = layer / ("pytorch_model.bin" if pickled else "model.safetensors")
    file.write_bytes(file.read_bytes()[:-40])
    with fails_with(ErrorCode.FILE_UNREADABLE, path=file):
        load_dense_layer(layer, STATES, allow_pickle=True)


def test_weights_in_several_files_are_refused(layer: Path) -> None:
    index = {"weight_map": {"linear.weight": "first.safetensors", "linear.bias": "first.safetensors"}}
    (layer / "model.safetensors").rename(layer / "first.safetensors")
    (layer / "model.safetensors.index.json").write_text(json.dumps(index))
    with fails_with(ErrorCode.FILE_MISMATCH, path=layer):
        load_dense_layer(layer, STATES, allow_pickle=False)


def test_pickled_parameters_are_not_trained(layer: Path) -> None:
    (layer / "model.safetensors").unlink()
    torch.save({"linear.weight": torch.nn.Parameter(torch.ones(WIDTH, STATES))}, layer / "pytorch_model.bin")
    assert not load_dense_layer(layer, STATES, allow_pickle=True).weight.requires_grad


def test_missing_files_are_refused(layer: Path) -> None:
    (layer / "model.safetensors").unlink()
    with fails_with(ErrorCode.FILE_MISSING, path=layer / "model.safetensors"):
        load_dense_layer(layer, STATES, allow_pickle=True)
    (layer / "config.json").unlink()
    with fails_with(ErrorCode.FILE_MISSING, path=layer / "config.json"):
        load_dense_layer(layer, STATES, allow_pickle=True)


def test_values_that_are_no_numbers_are_refused(layer: Path) -> None:
    write_weights(layer, weight=torch.full((WIDTH, STATES), float("nan")))
    with fails_with(ErrorCode.NOT_FINITE, path=layer, tensor="weight"):
        load_dense_layer(layer, STATES, allow_pickle=False)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["Tanh", "torch.nn.modules.activation.ReLU", "torch.nn.GELU", "", "sentence_embedding"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(("activation_function", "module_input_name", "module_output_name", "in_features", "bias"))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=st.dictionaries(KEYS, JSON, max_size=4) | JSON)
def test_any_configuration_is_read_or_gives_one_error(config: object, layer: Path) -> None:
    (layer / "config.json").write_text(json.dumps(config))
    try:
        loaded = load_dense_layer(layer, STATES, allow_pickle=False)
    except InputError as error:
        code, message = error.code, str(error)
    else:
        assert isinstance(config, dict)
        assert loaded.activation == str(config.get("activation_function", "x.Tanh")).rpartition(".")[2]
        return
    assert code in (ErrorCode.UNSUPPORTED_MODEL, ErrorCode.FILE_UNREADABLE)
    assert "; " in message
