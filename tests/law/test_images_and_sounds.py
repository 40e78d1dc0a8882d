"""Shrunk graphs of models of images and sounds, whose sizes cannot be made up, equal the gated models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from compressor.export import export_reference
from compressor.units import Site, find_sites, gated, keep_all
from graph_passes import Plan, SitePlan, load, shrink
from graph_passes.flow.sizes import EXAMPLE_SIZES
from tests.graph_passes.graphs import error, run

TOLERANCE = 1e-4
HEADS = 4
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "intermediate_size": 20,
}
Inputs = dict[str, Tensor]


def images(batch: int) -> Inputs:
    """RGB images of the size that models of images are trained with."""
    return {"pixel_values": torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(batch))}


def sounds(batch: int) -> Inputs:
    """A second at 16 kHz, a little more in larger batches."""
    samples = 16_000 + 100 * batch
    return {"input_values": torch.randn(batch, samples, generator=torch.Generator().manual_seed(batch))}


def dinov2() -> PreTrainedModel:
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    return hf.Dinov2Model(hf.Dinov2Config(**sizes, mlp_ratio=2, image_size=224, patch_size=14))


def siglip() -> PreTrainedModel:
    return hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIZES, image_size=224, patch_size=16))


def vit() -> PreTrainedModel:
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=224, patch_size=16))


def of_sound(model: Callable[..., PreTrainedModel], config: Callable[..., Any]) -> PreTrainedModel:
    """A model with the convolutions of Wav2Vec2, of which the last four are left out: a frame is 40 samples."""
    convolutions = {"conv_dim": (8, 8, 8), "conv_kernel": (10, 8, 4), "conv_stride": (5, 4, 2)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    return model(config(**SIZES, **convolutions, **positions, vocab_size=12, num_feat_extract_layers=3))


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[int], Inputs]]] = {
    "dinov2": (dinov2, images),
    "siglip": (siglip, images),
    "vit": (vit, images),
    "wav2vec2": (lambda: of_sound(hf.Wav2Vec2Model, hf.Wav2Vec2Config), sounds),
    "hubert": (lambda: of_sound(hf.HubertModel, hf.HubertConfig), sounds),
}


def half_of_the_heads(sites: list[Site], seed: int) -> Plan:
    """A plan that keeps a random half of the heads of each site."""
    rng = np.random.default_rng(seed)
    plans = []
    for site in sites:
        kept = sorted(rng.permutation(site.heads)[: site.heads // 2].tolist())
        plans.append(SitePlan(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, tuple(kept)))
    return Plan(sites=tuple(plans))


def prove(graph: ir.Model, model: PreTrainedModel, plan: Plan, inputs: Callable[[int], Inputs]) -> None:
    """Shrink a graph and check it against the gated model at two batch sizes, and lengths of sounds."""
    shrunk = shrink(graph, plan)
    assert shrunk.refused == ()
    assert len(shrunk.removed) == len(plan.sites)
    names = [value.name or "" for value in shrunk.model.graph.outputs]
    for batch in (1, 3):
        with torch.no_grad(), gated(model, plan):
            outputs = model(**inputs(batch))
        computed = run(shrunk.model, {name: value.numpy() for name, value in inputs(batch).items()})
        assert error(computed, [outputs[name].numpy() for name in names]) <= TOLERANCE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "dinov2" else pytest.mark.zoo) for name in MODELS]
)
def test_a_shrunk_graph_equals_the_gated_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build().eval()
    sites = find_sites(model, inputs(2))
    assert {site.heads for site in sites} == {HEADS}  # the pooling of SigLIP is another attention
    export_reference(model, keep_all(sites), inputs(2), tmp_path / "graph.onnx")
    plan = half_of_the_heads(sites, seed=1)
    prove(load(tmp_path / "graph.onnx"), model, plan, inputs)
    if name == "wav2vec2":  # a graph of another exporter, which runs at any length
        graph = load(tmp_path / "graph.onnx")
        del graph.metadata_props[EXAMPLE_SIZES]
        prove(graph, model, plan, inputs)
