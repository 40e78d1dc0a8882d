"""Exported decoders compute the same with fused attention, whole and without some heads: texts of several lengths,
padded on the left, first their tokens and then further ones, past a window of attention."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from compressor.generation.export import DECODER, export_generation
from compressor.units import keep_all
from compressor.units.find import find_units
from graph_passes import Plan, find_groups, gate_groups, load, shrink
from graph_passes.attention.gate_initializers import set_gates
from graph_passes.flow.caches import read_caches
from graph_passes.passes import FuseCachedAttention, FuseRotaryEmbedding, MergeReshapes, Normalize
from tests.graph_passes.graphs import error, run

pytestmark = pytest.mark.zoo

_CAUSAL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("LlamaForCausalLM", {**_CAUSAL, **_HEADS}),
    "mistral": ("MistralForCausalLM", {**_CAUSAL, **_HEADS, "sliding_window": 4}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 99, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    ),
}
NEW = (6, 1, 1, 3, 1)
"""Tokens of successive calls."""


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    """The decoder of a random model."""
    name, sizes = MODELS[request.param]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, decoder_start_token_id=0)).eval()
    ids = torch.arange(20).reshape(2, 10) + 5
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    folder = tmp_path_factory.mktemp(request.param)
    export_generation(model, keep_all(find_units(model, inputs).sites), folder)
    return load(folder / DECODER)


@pytest.mark.parametrize("share", [1.0, 0.6], ids=["whole", "fewer heads"])
def test_fused_attention_computes_the_same(decoder: ir.Model, share: float) -> None:
    model = decoder.clone()
    if share < 1:
        rng = random.Random(0)
        groups = find_groups(model).groups
        plan = Plan(
            groups=tuple(
                group.plan(sorted(rng.sample(range(group.units), max(1, round(share * group.units)))))
                for group in groups
            )
        )
        gate_groups(model, plan)
        set_gates(model.graph, plan)
        model = shrink(model, plan).model
    else:
        Normalize()(model)
    copy = model.clone()
    rotated = FuseRotaryEmbedding()(copy).report
    if any(node.op_type == "Cos" for node in model.graph):  # queries and keys of each layer
        assert len(rotated) == sum(node.op_type == "Neg" for node in model.graph)
    result = FuseCachedAttention()(copy)
    assert result.report.refused == ()
    MergeReshapes()(result.model)
    caches = read_caches(model)
    assert len(result.report.extending) == sum(present is not None for present in caches.values()) // 2
    assert len(result.report.reading) == sum(present is None for present in caches.values()) // 2
    compare_calls(model, result.model)


def compare_calls(model: ir.Model, fused: ir.Model) -> None:
    """Check that both graphs compute the same, call after call, each with the caches that the last one returned."""
    rng = np.random.default_rng(0)
    names = {past.name: present for past, present in read_caches(model).items()}
    state: dict[str, np.ndarray] = {}
    mask = np.ones((3, 0), np.int64)
    for number, new in enumerate(NEW):
        mask = np.concatenate([mask, np.ones((3, new), np.int64)], 1)
        if number == 0:
            mask[1, :2] = mask[2, :4] = 0
        feeds: dict[str, np.ndarray] = {}
        for value in model.graph.inputs:
            name, shape = value.name or "", [dim if isinstance(dim, int) else 7 for dim in value.shape or ()]
            if name in names:
                size = (3, shape[1], 0 if names[name] is not None else 7, shape[3])
                feeds[name] = state.setdefault(name, rng.standard_normal(size, np.float32))
            elif name == "encoder_attention_mask":
                feeds[name] = (np.arange(7) < np.array([[7], [5], [2]])).astype(np.int64)
            elif name == "attention_mask":
                feeds[name] = mask
            elif name == "position_ids":
                feeds[name] = np.maximum(mask.cumsum(1) - 1, 0)[:, -new:]
            else:
                feeds[name] = rng.integers(3, 90, (3, new))
        outputs = run(fused, feeds)
        assert error(outputs, run(model, feeds)) < 1e-4
        returned = {value.name: output for value, output in zip(fused.graph.outputs, outputs, strict=True)}
        state |= {name or "": returned[present.name] for name, present in names.items() if present is not None}
