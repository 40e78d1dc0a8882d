"""Tiny graphs as users have them: exported files, with tokenizers, arrays and texts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTImageProcessorPil

from compressor.model_folder.processor import IMAGES
from tests import folders
from tests.tasks import pictures

TEXT_INPUTS = ("input_ids", "attention_mask")
LENGTH = 8


class _Named(nn.Module):
    """A model with positional inputs, and some of its outputs."""

    def __init__(self, model: PreTrainedModel, outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        results = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return tuple(results[name] for name in self.outputs)


class _Images(nn.Module):
    """An image classifier with a positional input, and its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits


def write_graph(
    model: PreTrainedModel,
    path: Path,
    outputs: Sequence[str] = ("logits",),
    names: Sequence[str] | None = None,
    inputs: Sequence[str] = TEXT_INPUTS,
) -> Path:
    """Write the graph that torch's older exporter traces.

    Args:
        model: reads ids and a mask.
        path: the file.
        outputs: fields of the model's output.
        names: their names in the graph; None: those of the fields.
        inputs: names of the ids and the mask in the graph.
    """
    names = list(names or outputs)
    ids = torch.randint(5, 25, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0  # a mask without padding is left out of the graph
    axes = {name: {0: "batch", 1: "length"} for name in inputs} | {name: {0: "batch"} for name in names}
    path.parent.mkdir(parents=True, exist_ok=True)
    model.set_attn_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Named(model, outputs).eval(),
            (ids, mask),
            path,
            input_names=list(inputs),
            output_names=names,
            dynamic_axes=axes,
            opset_version=14,
            dynamo=False,
        )
    return path


def classifier(path: Path, *, has_biases: bool = False, **names: Sequence[str]) -> Path:
    """The graph of a BERT of one layer that classifies; its biases are zero, which the exporter stores once, or not."""
    torch.manual_seed(0)
    model = folders.bert()
    for name, bias in model.named_parameters() if has_biases else ():
        if name.endswith("bias"):
            nn.init.normal_(bias, std=0.02)
    return write_graph(model, path, **names)


def image_classifier(folder: Path, *, has_processor: bool = True) -> Path:
    """The graph of a ViT whose images have free axes, as optimum writes it, possibly beside its image processor."""
    model = pictures.vit()
    model.set_attn_implementation("eager")
    folder.mkdir(parents=True, exist_ok=True)
    axes = {IMAGES: dict(enumerate(("batch", "channels", "height", "width"))), "logits": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Images(model).eval(),
            (torch.randn(2, 3, pictures.SIZE, pictures.SIZE),),
            folder / "model.onnx",
            input_names=[IMAGES],
            output_names=["logits"],
            dynamic_axes=axes,
            opset_version=14,
            dynamo=False,
        )
    if has_processor:
        ViTImageProcessorPil(size={"height": pictures.SIZE, "width": pictures.SIZE}).save_pretrained(folder)
    return folder / "model.onnx"


def arrays(rows: int = 24, inputs: Sequence[str] = TEXT_INPUTS, seed: int = 0) -> dict[str, np.ndarray]:
    """Ids and masks of rows, the last tokens of some of which are padding."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(LENGTH) < rng.integers(4, LENGTH + 1, rows)[:, None]).astype(np.int64)
    return dict(zip(inputs, (rng.integers(5, 25, (rows, LENGTH)) * mask, mask), strict=True))


def npz(path: Path, **values: np.ndarray) -> Path:
    """Write a file of arrays."""
    np.savez(path, **values)  # type: ignore[arg-type]
    return path


def texts(path: Path) -> Path:
    """Write rows of text with labels."""
    rows = [f"{number % 2}\t{'good' if number % 2 else 'bad'} film {word}" for number, word in enumerate(folders.WORDS)]
    path.write_text("label\ttext\n" + "\n".join(rows * 2) + "\n")
    return path


def halve(source: Path, path: Path) -> Path:
    """Write a graph with every float, and casts to them, in half precision."""
    model, half = onnx.load(source), onnx.TensorProto.FLOAT16

    def convert(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = np.clip(numpy_helper.to_array(tensor), -65504, 65504).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    for tensor in model.graph.initializer:
        convert(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                convert(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = half
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = half
    del model.graph.value_info[:]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path
