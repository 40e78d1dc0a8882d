"""ONNX graphs in OpenVINO."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir.passes.common as common

from compressor.errors import ErrorCode, InputError
from compressor.targets.base import Feeds
from compressor.targets.graph_facts import is_quantized
from compressor.targets.openvino.batches import EngineRequest
from compressor.targets.openvino.session import (
    Names,
    compile_model,
    failure_reason,
    read_model,
    run_request,
    session_settings,
)
from graph_passes import load, save
from graph_passes.passes import TransposeSingleQuery

if TYPE_CHECKING:
    import openvino


def run_fixed(onnx: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """Outputs of an ONNX graph that OpenVINO reads itself, compiled for the shapes of one batch alone.

    Raises:
        InputError: OpenVINO cannot read the graph, or cannot run it at these shapes.
    """
    model, source = read_model(onnx), load(onnx)
    inputs = tuple(str(value.name) for value in source.graph.inputs if not value.is_initializer())
    names = Names(inputs, tuple(str(value.name) for value in source.graph.outputs))
    try:
        model.reshape({position: list(feeds[name].shape) for position, name in enumerate(names.inputs)})
    except Exception as error:  # OpenVINO raises RuntimeError and others
        raise InputError(
            f"{onnx}: OpenVINO cannot give the graph the shapes of these inputs ({failure_reason(error)}); run it with"
            " free axes",
            code=ErrorCode.RUNTIME_FAILED,
            path=onnx,
        ) from error
    compiled = compile_model(model, onnx, session_settings(None))
    return run_request(EngineRequest(compiled.create_infer_request()), names, feeds)


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
