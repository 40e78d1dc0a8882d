"""The portable quantized graph: standard ONNX with `QuantizeLinear` and `DequantizeLinear`, which every runtime reads.

NNCF computes it from the float graph and calibration rows: activations as 8-bit integers with a zero point, weights
symmetric per output channel, embedding tables included; outliers of activations are moved into weights (SmoothQuant),
and biases are corrected for the shift that rounding causes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.silence_libraries import one_line, quiet_tools
from compressor.targets.base import Feeds
from compressor.targets.graph_facts import float_products, is_quantized, quantized_products
from graph_passes import load, save
from graph_passes.passes import FoldWeights, TransposeSingleQuery

if TYPE_CHECKING:
    from types import ModuleType

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizedGraph:
    """A portable quantized graph.

    Attributes:
        path: its file.
        products: names of the products with constant weights that are quantized.
        in_float: names of those that stay in floats.
        rows: number of calibration rows.
        ruined: names of those that stay in floats because outliers ruin them; see `quantize_without_ruined`.
    """

    path: Path
    products: tuple[str, ...]
    in_float: tuple[str, ...]
    rows: int
    ruined: tuple[str, ...] = ()

    @classmethod
    def saved(cls, model: ir.Model, out: Path, rows: int) -> QuantizedGraph:
        """Write a quantized graph, for which some calibration rows were used."""
        save(model, out)
        products, in_float = (
            tuple(node.name or "" for node in nodes) for nodes in (quantized_products(model), float_products(model))
        )
        logger.debug("%s: %d products quantized, %d in floats", out, len(products), len(in_float))
        return cls(out, products, in_float, rows)


def require_nncf() -> ModuleType:
    """NNCF, without its telemetry.

    Raises:
        TargetMissingError: it is not installed.
    """
    # NNCF sends usage statistics to Intel unless this variable is set when it is imported.
    os.environ.setdefault("NNCF_CI", "1")
    try:
        import nncf
    except ImportError as error:
        text = "int8: NNCF is not installed, which quantizes graphs"
        raise TargetMissingError.of_package("nncf", "openvino", text) from error
    module: ModuleType = nncf
    return module


def quantize_graph(
    graph: Path,
    rows: Sequence[Feeds],
    out: Path,
    *,
    keep_float: Collection[str] = (),
    reduce_range: bool = False,
) -> QuantizedGraph:
    """Quantize a float graph and write it.

    Args:
        graph: the graph; its file stays unchanged.
        rows: calibration rows, one batch each, from which the ranges of activations are measured.
        out: the file to write.
        keep_float: names of products that stay in floats.
        reduce_range: whether weights use 7 of 8 bits, so that sums of two products fit into 16 bits; processors without
            int8 dot products saturate otherwise.

    Raises:
        TargetMissingError: NNCF is not installed.
        InputError: the graph is quantized already, NNCF cannot quantize it, there are no rows, or one lacks an input.
    """
    nncf = require_nncf()
    model = float_model(graph)
    calibration = nncf.Dataset(inputs_of(model, rows, graph))
    overflow_fix = nncf.OverflowFix.ENABLE if reduce_range else None
    # By default NNCF averages the ranges of rows, which clips the larger half. Where rows have one position only, as
    # behind a pooling, these are whole rows: the highest scores of a regression would all become one number.
    ranges = nncf.quantization.range_estimator.RangeEstimatorParametersSet.MINMAX
    ignored = nncf.IgnoredScope(names=sorted(keep_float)) if keep_float else None
    try:
        with quiet_tools(), producers_listed_once():
            proto = nncf.quantize(
                _in_memory(model),
                calibration,
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(rows),
                ignored_scope=ignored,
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    overflow_fix=overflow_fix, activations_range_estimator_params=ranges
                ),
            )
    except Exception as error:  # NNCF raises any exception on graphs that it does not expect
        raise InputError(
            f"{graph}: NNCF cannot quantize it ({one_line(error)}); use --precision fp32",
            code=ErrorCode.RUNTIME_FAILED,
            path=graph,
        ) from error
    quantized = ir.from_proto(proto)
    quantized.metadata_props.update(model.metadata_props)
    # The graph is read by OpenVINO itself too, at fixed shapes.
    TransposeSingleQuery()(quantized)
    return QuantizedGraph.saved(quantized, out, len(rows))


@contextmanager
def producers_listed_once() -> Iterator[None]:
    """While it is open, NNCF lists the producer of every value once for each version of a graph.

    To decide whether a product or a `Gather` reads an embedding table, NNCF lists the nodes of the whole graph anew. On
    the block-sparse attentions of a text of 4,096 tokens, with 14,000 nodes, that takes hours in all.
    """
    from nncf.onnx.graph.metatypes import onnx_metatypes

    list_producers = onnx_metatypes.get_parents_node_mapping
    listed: tuple[Any, int, dict[str, onnx.NodeProto]] | None = None

    def producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
        nonlocal listed
        nodes = len(model.graph.node)
        if listed is None or listed[0] is not model or listed[1] != nodes:
            listed = (model, nodes, list_producers(model))
        return listed[2]

    onnx_metatypes.get_parents_node_mapping = producers
    try:
        yield
    finally:
        onnx_metatypes.get_parents_node_mapping = list_producers


def _in_memory(model: ir.Model) -> onnx.ModelProto:
    """The graph with its weights, which NNCF reads from the message itself.

    Raises:
        ValueError: the weights exceed the 2 GB that a message may have.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)
    proto = ir.to_proto(model)
    if proto.ByteSize() < 0 or proto.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        raise ValueError("its weights exceed 2 GB")
    return proto


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
