"""What a quantizer starts from: a float graph with its weights at their products, and rows with its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import ErrorCode, InputError
from compressor.targets.base import Feeds
from compressor.targets.graph_facts import is_quantized
from graph_passes import load
from graph_passes.passes import FoldWeights


def float_model(graph: Path) -> ir.Model:
    """A float graph, without local functions and with each weight as an initializer at its product.

    Args:
        graph: its file, which stays unchanged.

    Raises:
        InputError: the graph is quantized already.
    """
    model = load(graph)
    if is_quantized(model):
        raise InputError(
            f"{graph}: its products are quantized already; use the float graph, or --precision fp32",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=graph,
        )
    common.InlinePass()(model)
    # NNCF reads constants of inlined functions as initializers only.
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    FoldWeights()(model)
    return model


def inputs_of(model: ir.Model, rows: Sequence[Feeds], graph: Path) -> list[Feeds]:
    """The rows without what the graph has no input for.

    Args:
        model: the graph.
        rows: calibration rows, one batch each.
        graph: the file of the graph, for messages.

    Raises:
        InputError: there are no rows, or one lacks an input.
    """
    if not rows:
        raise InputError(
            f"{graph}: there are no rows to calibrate on; add training rows (--data)",
            code=ErrorCode.TOO_FEW_ROWS,
            field="data",
        )
    names = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    missing = next((name for name in names for feeds in rows if name not in feeds), None)
    if missing is not None:
        raise InputError(
            f"{graph}: a calibration row lacks the input {missing}; give rows with {', '.join(names)}",
            code=ErrorCode.TENSOR_MISMATCH,
            tensor=missing,
        )
    return [{name: feeds[name] for name in names} for feeds in rows]


def without_padding(feeds: Feeds) -> list[Feeds]:
    """The rows of a batch one by one, without their padded positions, so that no range is measured on these.

    A mask `[batch, length]`, `attention_mask` or `decoder_attention_mask`, tells the padded positions of the integer
    inputs `[batch, length, ...]` of its side. Other inputs, and rows without a valid position, stay whole.
    """
    masks = {name: array != 0 for name, array in feeds.items() if name.endswith("attention_mask") and array.ndim == 2}
    if all(mask.all() for mask in masks.values()):
        return [feeds]
    rows: list[Feeds] = []
    for number in range(len(next(iter(masks.values())))):
        row = {name: array[number : number + 1] for name, array in feeds.items()}
        for name, array in feeds.items():
            mask = masks.get(f"{'decoder_' if name.startswith('decoder_') else ''}attention_mask")
            has_positions = mask is not None and array.shape[:2] == mask.shape and array.dtype.kind in "biu"
            if mask is not None and has_positions and mask[number].any():
                row[name] = row[name][:, mask[number]]
        rows.append(row)
    return rows
