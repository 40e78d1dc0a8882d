"""Models with recurrent layers are exported for texts of any length, whatever the length of the example."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_settings
from torch.nn.functional import interpolate
from transformers.models.cosmos3_edge.modeling_cosmos3_edge import Cosmos3EdgeVisionEmbeddings
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from benchmarks.families_tiny import VOCABULARY, tiny_model
from compressor.export import export_reference
from compressor.models.export_forms import any_length, resize_positions, resized_at_once
from compressor.silence_libraries import quiet_tools
from compressor.units import find_sites, gated
from tests.exported_graphs import Session
from tests.random_plans import random_plan
from tests.unchanged import unchanged
from tests.zoo import text

TOLERANCE = 1e-5
SIZES = ((1, 2), (3, 4), (3, 13), (2, 16), (1, 90))
"""Batch sizes and lengths on both sides of a multiple of the size of a chunk."""
EXAMPLE = 8
SOLVED = 5e-5
"""Tolerance of delta rules: an exported one inverts a triangular matrix, where PyTorch solves the system."""
CASES = (
    # Family, positions of a chunk (0: that of the family), tolerance. The example has one whole chunk, two, or a part.
    ("nemotron_h", EXAMPLE, TOLERANCE),
    ("bamba", 4, TOLERANCE),
    ("falcon_h1", 16, TOLERANCE),
    ("granitemoehybrid", 4, TOLERANCE),
    ("zamba2", 4, TOLERANCE),
    ("jamba", 0, TOLERANCE),
    ("recurrent_gemma", 0, TOLERANCE),
    ("kimi_linear", 0, SOLVED),
    ("qwen3_next", 0, SOLVED),
)


@pytest.mark.zoo
@pytest.mark.parametrize(("family", "chunk", "tolerance"), [pytest.param(*case, id=case[0]) for case in CASES])
def test_the_graph_computes_what_the_model_computes_at_every_length(
    family: str, chunk: int, tolerance: float, tmp_path: Path
) -> None:
    model: Any = tiny_model(family)
    for part in model.modules():
        if chunk and hasattr(part, "chunk_size"):
            part.chunk_size = chunk
    example = inputs(2, EXAMPLE)
    plan = random_plan(find_sites(model, example), np.random.default_rng(0))
    with unchanged(model):
        export_reference(model, plan, example, tmp_path / "reference.onnx")
    session = Session(tmp_path / "reference.onnx")
    with gated(model, plan, attention="eager"), torch.no_grad():
        for batch, length in SIZES:
            sample = inputs(batch, length)
            expected = model(**sample, use_cache=False).logits.numpy()
            error = np.abs(session.run(sample)["logits"] - expected).max() / np.abs(expected).max()
            assert error <= tolerance, (batch, length)


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    """Ids below the vocabulary, and a mask that pads the last row of a batch."""
    sample = text(batch, length, seed=length)
    sample["input_ids"] = sample["input_ids"] % (VOCABULARY - 8) + 8
    if batch == 1:
        sample["attention_mask"][:] = 1
    return sample


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def part_of(owner: Any) -> nn.Module:
    """A part of a model, whose class is the owner of a recurrence or is defined in it."""
    cls: Any = owner if isinstance(owner, type) else type("Part", (nn.Module,), {"__module__": owner.__name__})
    part: nn.Module = cls.__new__(cls)
    nn.Module.__init__(part)
    return part


def selective_scan(length: int) -> tuple[Any, str, tuple[Any, ...], dict[str, Any]]:
    operands = (normal(2, 6, length), normal(2, 6, length), -normal(6, 4).exp())
    states = (normal(2, 4, length), normal(3, 4, length)[:2])
    options = {"D": normal(6), "z": normal(2, 6, length), "delta_bias": normal(6), "delta_softplus": True}
    return modeling_jamba, "mamba_selective_scan", (*operands, *states), {**options, "return_last_state": True}


def chunk_scan(length: int) -> tuple[Any, str, tuple[Any, ...], dict[str, Any]]:
    operands = (normal(2, length, 4, 6), normal(2, length, 4), -normal(4).exp())
    states = (normal(2, length, 1, 5), normal(3, length, 1, 5)[:2])
    options = {"chunk_size": 16, "D": normal(4), "dt_softplus": True, "return_final_states": True}
    return modeling_mamba2, "mamba2_chunk_scan", (*operands, *states), options


def delta_rule(length: int) -> tuple[Any, str, tuple[Any, ...], dict[str, Any]]:
    queries = tuple(normal(batch, length, 4, 6)[:2] for batch in (2, 3, 4))
    gates = (-normal(2, length, 4).exp(), normal(3, length, 4)[:2].sigmoid())
    options = {"chunk_size": 4, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return modeling_qwen3_next, "torch_chunk_gated_delta_rule", (*queries, *gates), options


def delta_attention(length: int) -> tuple[Any, str, tuple[Any, ...], dict[str, Any]]:
    _, _, (query, key, value, _, beta), options = delta_rule(length)
    decays = -normal(2, length, 4, 6).exp()
    return modeling_kimi_linear, "chunk_kimi_delta_attention", (query, key, value, decays, beta), options


def linear_recurrence(length: int) -> tuple[Any, str, tuple[Any, ...], dict[str, Any]]:
    reset = torch.zeros(2, length, 1, dtype=torch.bool)
    reset[:, 0] = True
    operands = (None, normal(2, length, 6), normal(3, length, 6)[:2].sigmoid(), reset, None)
    return RecurrentGemmaRglru, "_rnn_scan", operands, {}


@pytest.mark.parametrize(
    "recurrence",
    [
        selective_scan,
        chunk_scan,
        *(pytest.param(rule, marks=pytest.mark.zoo) for rule in (linear_recurrence, delta_rule, delta_attention)),
    ],
)
@pytest.mark.parametrize("length", [24, pytest.param(200, marks=pytest.mark.zoo)])
def test_the_form_for_the_export_equals_the_recurrence(recurrence: Any, length: int) -> None:
    owner, name, operands, options = recurrence(length)
    original = getattr(owner, name)
    with torch.no_grad(), quiet_tools():
        expected = original(*operands, **options)
        with any_length(part_of(owner)):
            assert getattr(owner, name) is not original
            results = getattr(owner, name)(*operands, **options)
    assert getattr(owner, name) is original
    for result, reference in zip(results, expected, strict=True):
        assert result.shape == reference.shape
        assert (result - reference).abs().max() <= TOLERANCE * reference.abs().max()


def test_a_model_without_recurrences_keeps_the_settings_of_torch() -> None:
    with any_length(nn.Linear(2, 2)):
        assert not shape_settings.backed_size_oblivious
        assert torch.is_grad_enabled()


SHAPES = torch.tensor([[4, 4], [16, 16], [7, 11], [20, 12], [1, 9], [13, 3], [24, 10]])
PATCHES = 260


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (8, 8), (5, 7)])
def test_tables_are_resized_to_the_shape_of_each_image(rows: int, columns: int) -> None:
    table = torch.randn(rows, columns, 6, generator=torch.Generator().manual_seed(0))
    at_once, loop = resize_positions(table, SHAPES, PATCHES), cast(Any, Siglip2VisionEmbeddings)
    torch.testing.assert_close(at_once, loop.resize_positional_embeddings(table, SHAPES, PATCHES))
    height, width = SHAPES[2].tolist()
    image = interpolate(table.permute(2, 0, 1)[None], (height, width), mode="bilinear", antialias=True)
    torch.testing.assert_close(at_once[2, : height * width], image[0].flatten(1).T)


def test_images_of_one_column_are_resized_by_rows() -> None:
    table = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(0))
    at_once = resize_positions(table, torch.tensor([[5, 1], [1, 5]]), 5)
    expected = resize_positions(table.transpose(0, 1), torch.tensor([[1, 5], [5, 1]]), 5)
    torch.testing.assert_close(at_once, expected)
    assert (at_once[0, 0] - at_once[0, 1]).abs().max() > 1e-2


def test_the_function_of_the_model_is_replaced_and_restored() -> None:
    name, model = "resize_positional_embeddings", tiny_model("siglip2")
    original = inspect.getattr_static(Siglip2VisionEmbeddings, name)
    with any_length(model):
        assert getattr(Siglip2VisionEmbeddings, name) is resize_positions
        assert isinstance(inspect.getattr_static(Siglip2VisionEmbeddings, name), staticmethod)
    assert inspect.getattr_static(Siglip2VisionEmbeddings, name) is original


def test_a_function_of_other_inputs_stays() -> None:
    function = Cosmos3EdgeVisionEmbeddings.resize_positional_embeddings
    assert resized_at_once(function) is function
