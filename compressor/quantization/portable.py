"""The portable quantized graph: standard ONNX with `QuantizeLinear` and `DequantizeLinear`, which every runtime reads.

NNCF computes it from the float graph and calibration examples. Activations are 8-bit integers with a zero point;
weights and embedding tables are symmetric per output channel. Outliers of activations are moved into weights
(SmoothQuant), and biases are corrected for the shift that rounding causes.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.silence_libraries import one_line, quiet_tools
from compressor.targets.base import Feeds
from compressor.targets.graph_facts import is_quantized, matmul_names
from graph_passes import load, save
from graph_passes.passes import FoldWeights, TransposeSingleQuery

logger = logging.getLogger(__name__)

_JOINED = 1024
"""Maximum number of values of an input, e.g. tokens, in a batch of calibration examples that are joined."""


@dataclass(frozen=True)
class QuantizedGraph:
    """A portable quantized graph.

    Attributes:
        path: its file.
        products: names of the matmuls with constant weights that are quantized.
        in_float: names of the matmuls with constant weights that stay in floats, except those in `ruined`.
        rows: number of batches of calibration examples.
        ruined: names of the matmuls that stay in floats because outliers ruin them; see `quantize_without_ruined`.
    """

    path: Path
    products: tuple[str, ...]
    in_float: tuple[str, ...]
    rows: int
    ruined: tuple[str, ...] = ()

    @classmethod
    def saved(cls, model: ir.Model, out: Path, rows: int) -> QuantizedGraph:
        """Write a quantized graph, which was calibrated with `rows` batches."""
        save(model, out)
        matmuls, in_float = matmul_names(model)
        logger.debug("%s: %d matmuls quantized, %d in floats", out, len(matmuls), len(in_float))
        return cls(out, matmuls, in_float, rows)


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
        text = "int8: NNCF, which quantizes graphs, is not installed"
        raise TargetMissingError.of_package("nncf", "openvino", text) from error
    return nncf


def quantize_graph(
    graph: Path,
    examples: Sequence[Feeds],
    out: Path,
    *,
    keep_float: Collection[str] = (),
    reduce_range: bool = False,
) -> QuantizedGraph:
    """Quantize a float graph and write it.

    Args:
        graph: the graph; its file stays unchanged.
        examples: batches of calibration examples, on which the ranges of activations are measured.
        keep_float: names of matmuls that stay in floats.
        reduce_range: whether weights use 7 of 8 bits, so that a sum of two products fits into 16 bits; processors
            without int8 dot products saturate otherwise.

    Raises:
        TargetMissingError: NNCF is not installed.
        InputError: the graph is quantized already, NNCF cannot quantize it, there are no examples, or a batch lacks an
            input.
    """
    nncf = require_nncf()
    model = float_model(graph)
    batches = joined(model, inputs_of(model, examples, graph))
    overflow_fix = nncf.OverflowFix.ENABLE if reduce_range else None
    # By default NNCF averages the ranges of examples, which clips the larger half of them. After a pooling that means
    # whole examples: the highest scores of a regression would all become the same number.
    ranges = nncf.quantization.range_estimator.RangeEstimatorParametersSet.MINMAX
    ignored = nncf.IgnoredScope(names=sorted(keep_float)) if keep_float else None
    try:
        with quiet_tools(), producers_listed_once():
            proto = nncf.quantize(
                _in_memory(model),
                nncf.Dataset(batches),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(batches),
                ignored_scope=ignored,
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    overflow_fix=overflow_fix, activations_range_estimator_params=ranges
                ),
            )
    except Exception as error:  # NNCF raises any exception on graphs that it does not expect
        text = f"{graph}: NNCF cannot quantize it ({one_line(error)}); use --precision fp32"
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=graph) from error
    quantized = ir.from_proto(proto)
    quantized.metadata_props.update(model.metadata_props)
    # OpenVINO may read the graph without the rewrites of this package, at fixed shapes.
    TransposeSingleQuery()(quantized)
    return QuantizedGraph.saved(quantized, out, len(examples))


@contextmanager
def producers_listed_once() -> Iterator[None]:
    """Let NNCF list the producers of all values only once for each version of a graph, inside the context.

    For each matmul or `Gather`, NNCF lists all nodes of the graph again to decide whether the node reads an embedding
    table. With the block-sparse attentions of a text of 4,096 tokens, which are 14,000 nodes, that takes hours.
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
    """The graph as a message that contains its weights, at most 2 GB, since NNCF reads no external data."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)
    proto = ir.to_proto(model)
    if proto.ByteSize() < 0 or proto.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        raise ValueError("its weights exceed 2 GB")
    return proto


def float_model(graph: Path) -> ir.Model:
    """A float graph without local functions, whose weights are initializers that matmuls read directly.

    Args:
        graph: its file, which stays unchanged.

    Raises:
        InputError: the graph is quantized already.
    """
    model = load(graph)
    if is_quantized(model):
        text = f"{graph}: its matmuls are quantized already; use the float graph, or --precision fp32"
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=graph)
    common.InlinePass()(model)
    # NNCF reads constants of inlined functions as initializers only.
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    FoldWeights()(model)
    return model


def inputs_of(model: ir.Model, examples: Sequence[Feeds], graph: Path) -> list[Feeds]:
    """The calibration examples without arrays for which the graph has no input.

    Raises:
        InputError: there are no examples, or a batch lacks an input.
    """
    if not examples:
        text = f"{graph}: there are no rows to calibrate on; add training rows (--data)"
        raise InputError(text, code=ErrorCode.TOO_FEW_ROWS, field="data")
    names = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    missing = next((name for name in names for feeds in examples if name not in feeds), None)
    if missing is not None:
        text = f"{graph}: a calibration row lacks the input {missing}; give rows with {', '.join(names)}"
        raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, tensor=missing)
    return [{name: feeds[name] for name in names} for feeds in examples]


def joined(model: ir.Model, examples: Sequence[Feeds]) -> list[Feeds]:
    """The calibration examples in batches of equal shapes, without padding.

    NNCF spends its time on numpy calls for each tensor and batch, so fewer batches are faster. The ranges are the same;
    the means that correct biases weigh batches equally. A graph whose inputs do not share a free first axis gets its
    examples unchanged.
    """
    axes = [value.shape[0] if value.shape else None for value in model.graph.inputs if not value.is_initializer()]
    if len(set(axes)) != 1 or not isinstance(axes[0], ir.SymbolicDim) or axes[0].value is None:
        return list(examples)
    alike: dict[tuple[tuple[int, ...], ...], list[Feeds]] = defaultdict(list)
    for feeds in examples:
        alike[tuple(array.shape for array in feeds.values())].append(feeds)
    batches = list[Feeds]()
    for same in alike.values():
        count = max(1, _JOINED // max(array.size for array in same[0].values()))
        parts = (same[start : start + count] for start in range(0, len(same), count))
        batches += [{name: np.concatenate([feeds[name] for feeds in part]) for name in part[0]} for part in parts]
    return batches
