"""Graphs without gates: plain transformers models through both of torch's exporters, and with fused operators."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch
from onnxscript.rewriter.ort_fusions import optimize_for_ort
from torch import Tensor, nn
from transformers import PreTrainedModel

Attention = Literal["eager", "sdpa"]


class _Answer(nn.Module):
    """A model whose inputs are positional and whose only output are the logits, or its first output."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names
        has_cache = "use_cache" in inspect.signature(model.forward).parameters or hasattr(model.config, "use_cache")
        self.options = {"use_cache": False} if has_cache else {}

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs = self.model(**dict(zip(self.names, inputs, strict=True)), **self.options)
        answer: Tensor = outputs["logits"] if "logits" in outputs else outputs[0]
        return answer


def free_axes(inputs: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Names of the axes of each input whose sizes are free: those of images and sounds have one size but the batch."""
    return {
        name: {0: "batch"} | ({} if value.is_floating_point() else {1: "target" if "decoder" in name else "length"})
        for name, value in inputs.items()
    }


def _export(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], path: Path, attention: Attention, **options: Any
) -> None:
    model.set_attn_implementation(attention)
    names = tuple(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both exporters warn about themselves and about the models
        torch.onnx.export(
            _Answer(model, names),
            tuple(inputs.values()),
            path,
            input_names=list(names),
            output_names=["logits"],
            verbose=False,
            **options,
        )


def trace(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], path: Path, *, opset: int, attention: Attention
) -> ir.Model:
    """The graph that torch's older exporter traces."""
    free = free_axes(inputs)
    _export(model, inputs, path, attention, dynamo=False, opset_version=opset, dynamic_axes=free)
    return ir.load(path)


def export(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], path: Path, *, opset: int, attention: Attention
) -> ir.Model:
    """The graph that torch's newer exporter (dynamo) exports and optimizes."""
    shapes = (tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in free_axes(inputs).values()),)
    _export(
        model, inputs, path, attention, dynamo=True, opset_version=opset, dynamic_shapes=shapes, external_data=False
    )
    return ir.load(path)


def fused_by_onnxscript(model: ir.Model) -> ir.Model:
    """The graph with the operators of ONNX Runtime that onnxscript's fusions find."""
    fused, _ = optimize_for_ort(model.clone())
    return fused


def fused_by_onnxruntime(path: Path, heads: int, width: int) -> ir.Model:
    """The graph with the operators that ONNX Runtime's transformer optimizer finds in a BERT."""
    from onnxruntime.transformers.optimizer import optimize_model

    optimized = optimize_model(str(path), model_type="bert", num_heads=heads, hidden_size=width, opt_level=0)
    return ir.from_proto(optimized.model)
