"""The reader of the sum of a linear's output and the residual stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.selection.pruners.layerwise.layer_run import SumReader, find_sum
from tests.selection.pruners.reconstruct.shared import CASES
from tests.unchanged import unchanged

READERS = [
    ("bert", "bert.encoder.layer.0.attention.output.dense", "bert.encoder.layer.0.attention.output.LayerNorm"),
    ("bert", "bert.encoder.layer.2.output.dense", "bert.encoder.layer.2.output.LayerNorm"),
    ("distilbert", "distilbert.transformer.layer.1.attention.out_lin", "distilbert.transformer.layer.1.sa_layer_norm"),
    ("modernbert", "model.layers.1.attn.Wo", "model.layers.1.mlp_norm"),
    ("modernbert", "model.layers.2.mlp.Wo", "model.final_norm"),
    ("gpt2", "transformer.h.0.attn.c_proj", "transformer.h.0.ln_2"),
    ("gpt2", "transformer.h.0.mlp.c_proj", "transformer.h.1"),
    ("llama", "model.layers.0.self_attn.o_proj", "model.layers.0.post_attention_layernorm"),
    ("llama", "model.layers.0.mlp.down_proj", "model.layers.1"),
    ("qwen3", "model.layers.2.mlp.down_proj", "model.norm"),
    ("t5", "encoder.block.1.layer.1.DenseReluDense.wo", "encoder.final_layer_norm"),
    ("t5", "decoder.block.0.layer.1.EncDecAttention.o", "decoder.block.0.layer.2"),
    ("bart", "model.decoder.layers.0.encoder_attn.out_proj", "model.decoder.layers.0.encoder_attn_layer_norm"),
    ("marian", "model.decoder.layers.1.fc2", "model.decoder.layers.1.final_layer_norm"),
    ("vit", "vit.layers.0.attention.o_proj", "vit.layers.0.layernorm_after"),
    ("clip_text", "text_model.encoder.layers.0.mlp.fc2", "text_model.encoder.layers.1"),
    ("whisper", "model.encoder.layers.1.fc2", "model.encoder.layer_norm"),
]


@pytest.mark.parametrize(("family", "linear", "reader"), READERS)
def test_reader_of_each_family(family: str, linear: str, reader: str) -> None:
    model, inputs = CASES[family]()
    with unchanged(model):
        assert find_sum(model, inputs, linear) == SumReader(linear, ((reader, 1),))


@pytest.mark.parametrize(
    ("family", "linear"),
    [
        ("llama", "model.layers.0.mlp.gate_proj"),
        ("bert", "bert.encoder.layer.0.attention.self.query"),
        ("bert", "bert.encoder.layer.0.intermediate.dense"),
        ("bert", "bert.pooler.dense"),
    ],
)
def test_linears_inside_a_sublayer_have_no_sum(family: str, linear: str) -> None:
    model, inputs = CASES[family]()
    assert find_sum(model, inputs, linear) is None


def test_each_call_of_a_shared_layer_has_a_reader() -> None:
    model, inputs = CASES["shared_llama"]()
    linear = "model.layers.0.mlp.down_proj"
    calls = (("model.layers.0", 1), ("model.layers.0", 1), ("model.norm", 1))
    assert find_sum(model, inputs, linear) == SumReader(linear, calls)


def test_a_scaled_residual_branch_has_no_sum() -> None:
    model, inputs = CASES["llama"]()
    linear = "model.layers.0.self_attn.o_proj"

    def scale(module: object, args: object, output: Tensor) -> Tensor:
        return output * torch.tensor(0.5)

    handle = model.get_submodule(linear).register_forward_hook(scale)
    assert find_sum(model, inputs, linear) is None
    handle.remove()
    assert find_sum(model, inputs, linear) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_precision(dtype: torch.dtype) -> None:
    model, inputs = CASES["llama"]()
    model.to(dtype)  # type: ignore[arg-type]
    linear = "model.layers.1.self_attn.o_proj"
    reader = SumReader(linear, (("model.layers.1.post_attention_layernorm", 1),))
    assert find_sum(model, inputs, linear) == reader
    assert find_sum(model, inputs, "model.layers.1.mlp.gate_proj") is None
