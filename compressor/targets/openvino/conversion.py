"""ONNX graphs in OpenVINO."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir.passes.common as common

from compressor.targets.graph_facts import is_quantized
from compressor.targets.openvino.session import read_model
from graph_passes import load, save
from graph_passes.passes import TransposeSingleQuery

if TYPE_CHECKING:
    import openvino


def convert(onnx: Path) -> openvino.Model:
    """An ONNX graph in OpenVINO. Functions are inlined, which OpenVINO does not do itself.

    In a quantized graph, attentions of one query are rewritten, which OpenVINO computes wrongly at a fixed shape.

    Raises:
        InputError: OpenVINO cannot read it; the message names the operator where there is one.
    """
    model = load(onnx)
    changed = common.InlinePass()(model).modified
    if is_quantized(model):
        changed = TransposeSingleQuery()(model).modified or changed
    if not changed:
        return read_model(onnx)
    with tempfile.TemporaryDirectory() as folder:
        rewritten = Path(folder) / onnx.name
        save(model, rewritten)
        return read_model(rewritten)
