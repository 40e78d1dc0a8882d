"""Models read images of the size that their processor makes, in example inputs and in the exported graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from compressor.export import export_reference
from compressor.model_folder import example_inputs, load
from compressor.model_folder.processor import IMAGES
from compressor.units import find_sites, keep_all
from graph_passes import load as load_graph
from tests.graph_passes.graphs import run
from tests.tasks.pictures import save_classifier

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}


def dinov2() -> PreTrainedModel:
    """Its positions are interpolated for other sizes than that of its configuration."""
    return hf.Dinov2ForImageClassification(hf.Dinov2Config(**SIZES, mlp_ratio=2, image_size=32, patch_size=8))


def swin() -> PreTrainedModel:
    config = hf.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=2)
    config.num_labels = 3
    return hf.SwinForImageClassification(config)


def deit() -> PreTrainedModel:
    return hf.DeiTForImageClassification(hf.DeiTConfig(**SIZES, intermediate_size=20, image_size=24, patch_size=8))


MODELS = {"dinov2": (dinov2, 24), "swin": (swin, 16), "deit": (deit, 24)}
"""Name -> the model, and the height and width of the images that its processor makes."""


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_graphs_have_the_size_of_the_processor(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, side = MODELS[name]
    folder = load(save_classifier(tmp_path / "model", build(), size={"height": side, "width": side}))
    assert (folder.task, folder.image_size) == ("image-classification", (3, side, side))
    inputs = example_inputs(folder, 2, 8)
    assert inputs[IMAGES].shape == (2, 3, side, side)
    sites = find_sites(folder.model, inputs)
    assert sites
    export_reference(folder.model, keep_all(sites), inputs, tmp_path / "graph.onnx", fixed=(IMAGES,))
    graph = load_graph(tmp_path / "graph.onnx")
    shape = graph.graph.inputs[0].shape
    assert shape is not None
    assert [shape[axis] for axis in (1, 2, 3)] == [3, side, side]
    images = example_inputs(folder, 3, 8, seed=1)[IMAGES]
    with torch.no_grad():
        expected = folder.model(images).logits.numpy()
    assert np.abs(run(graph, {IMAGES: images.numpy()})[0] - expected).max() <= 1e-4
