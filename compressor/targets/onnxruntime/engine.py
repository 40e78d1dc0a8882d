"""Engines of ONNX Runtime: fuse a graph, load it, and count the operators that it executes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from compressor.environment import int8_instructions
from compressor.errors import ErrorCode, InputError
from compressor.results import QuantizedProducts
from compressor.targets.base import TOLERANCE, Feeds, Precision, Provider
from compressor.targets.cuda import driver
from compressor.targets.graph_facts import fusible_attentions
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.choose_norms import choose_norms
from compressor.targets.onnxruntime.dynamic import INT8_KERNELS, quantize_dynamically
from compressor.targets.onnxruntime.fusion import Fusion, Rewrite, fuse, fusion_trials, rewrite_for_ort
from compressor.targets.options import Widths
from compressor.targets.peak_memory import peak_growth
from compressor.targets.quantized_graph import float_products, float_widths_of, quantized_products
from compressor.targets.random_inputs import fixed_batch
from compressor.targets.reach import check_reach
from compressor.targets.tensor_specs import FREE, TensorSpec
from compressor.targets.trial_inputs import trial_feeds
from graph_passes import load, save
from graph_passes.block_sparse.function import NAME, is_block_sparse
from graph_passes.block_sparse.masks import REACH
from graph_passes.passes import ReducePrecision, SplitSkipNorms

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, NodeArg

ATTENTIONS = ("Attention", "GroupQueryAttention", "MultiHeadAttention", "QAttention")
"""Operator types of ONNX Runtime that compute one whole attention each."""
_REPORTED = (
    *ATTENTIONS,
    *sorted(INT8_KERNELS - {"QAttention"}),
    *("Softmax", "LayerNormalization", "SimplifiedLayerNormalization", "ReduceMean"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "BiasGelu", "FastGelu", "Gelu", "Erf"),
)
"""Operator types that `optimization` counts."""


@dataclass(frozen=True)
class OrtEngine:
    """A graph loaded into ONNX Runtime; see `Engine` for the other attributes.

    Attributes:
        fusion: outcome of fusing the graph; None for an engine that was built earlier, or from a quantized graph.
        reach: input name -> number of positions that the block masks of the graph cover.
    """

    path: Path
    precision: Precision
    attentions: int
    fused: int
    kernels: Mapping[str, int]
    optimization: str
    session: Mapping[str, Any]
    fusion: Fusion | None
    reach: Mapping[str, int]
    quantized: QuantizedProducts | None
    _session: InferenceSession = field(repr=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs."""
        return tuple(value.name for value in self._session.get_inputs())

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Names, element types and shapes of the inputs."""
        return tuple(map(_spec, self._session.get_inputs()))

    @property
    def host(self) -> str:
        """Runtime, device and threads."""
        device = str(driver().device) if self._is_on_gpu else self.session["provider"]
        host = f"{self.session['runtime']} on {device}, {self.session['intra_op_threads']} threads"
        return f"{host}, compiled kernel" if "kernel" in self.session else host

    @property
    def _is_on_gpu(self) -> bool:
        return bool(self.session["provider"] == ort_session.PROVIDERS["cuda"])

    @property
    def is_reentrant(self) -> bool:
        """True: a session may run in several threads."""
        return True

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs."""
        return tuple(value.name for value in self._session.get_outputs())

    @property
    def products(self) -> Mapping[str, int]:
        """Number of products with constant weights by precision, where some are in int8; otherwise unknown."""
        return {} if self.quantized is None else self.quantized.by_precision

    @property
    def built(self) -> None:
        """None: ONNX Runtime loads the graph itself."""
        return None

    @property
    def device_seconds(self) -> None:
        """None: ONNX Runtime does not report it."""
        return None

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; see `Engine.run`.

        Raises:
            InputError: an input is missing or longer than the block masks, or the graph cannot run on these inputs.
        """
        check_reach(self.reach, feeds)
        return ort_session.run_session(self._session, feeds)

    def memory(self, feeds: Feeds) -> int | None:
        """Bytes that loading and running the graph takes at the peak; see `Engine.memory`."""
        return peak_growth(ort_session.__name__, self.path, self.session, feeds, on_gpu=self._is_on_gpu)


def build_engine(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
    kernel: Path | None = None,
    norms_timed_at: tuple[int, int] = (1, 128),
    split_norms: bool | None = None,
    norm_seconds: float = 0.0,
    float_widths: Collection[Widths] = (),
    rewrite: Rewrite = rewrite_for_ort,
) -> OrtEngine:
    """Fuse a graph for ONNX Runtime and load it.

    Args:
        onnx: the graph.
        out: the file to write.
        precision: numeric precision of the engine.
        provider: device to run on; None: CUDA where there is a GPU and no kernel.
        threads: threads per call; None: one per core.
        kernel: library of `compress kernel`.
        norms_timed_at: batch size and length at which the faster form of normalizations is chosen.
        split_norms: whether ONNX Runtime's fused normalizations are split; None: where that is faster.
        norm_seconds: time spent on finding that out; 0: they stay fused.
        float_widths: widths of products that stay in floats where a float graph is quantized.
        rewrite: fuses a model.

    Raises:
        TargetMissingError: the device is missing, or does not compute in the precision.
        UsageError: the kernel is missing, or is for another device.
        InputError: ONNX Runtime cannot load or run the graph.
    """
    settings = ort_session.session_settings(ort_session.choose_provider(provider, precision, kernel), threads, kernel)
    if precision == "int8" and (products := quantized_products(load(onnx))):
        # ONNX Runtime fuses quantized products itself; rules for float operators would separate them from their scales.
        save(load(onnx), out)
        return _open(out, onnx, settings, precision, ["quantized graph"], requested=len(products))
    fusion = fuse(onnx, out, settings, rewrite)
    changes = [str(fusion)]
    if precision == "fp16":
        save(ReducePrecision()(load(out)).model, out)
        changes.append("converted to half precision, inputs and outputs unchanged")
    requested = None
    if precision == "int8":
        reduce_range = not int8_instructions()
        requested = len(quantize_dynamically(out, out, reduce_range=reduce_range, float_widths=float_widths))
        changes.append("quantized dynamically")
    if split_norms:
        save(SplitSkipNorms()(load(out)).model, out)
        changes.append("norms split")
    elif split_norms is None and norm_seconds:
        feeds = _sized_feeds(onnx, *norms_timed_at)
        choice = choose_norms(out, settings, feeds, TOLERANCE[precision], norm_seconds)
        changes += [choice] if choice is not None else []
    return _open(out, onnx, settings, precision, changes, fusion, requested)


def load_engine(
    path: Path, *, provider: Provider | None = None, threads: int | None = None, kernel: Path | None = None
) -> OrtEngine:
    """Load a graph that `build_engine` wrote; attentions are counted in the graph as it is.

    Args:
        path: the graph.
        provider: device to run on; None: CUDA where there is a GPU and no kernel.
        threads: threads per call; None: one per core.
        kernel: library of `compress kernel`.

    Raises:
        TargetMissingError: the device is missing, or does not compute in the graph's precision.
        InputError: the file is missing, or ONNX Runtime cannot load it.
    """
    if not path.is_file():
        raise InputError(
            f"{path}: no such engine; build it with compress build", code=ErrorCode.FILE_MISSING, path=path
        )
    model = load(path)
    precision = _precision(model)
    provider = ort_session.choose_provider(provider, precision, kernel)
    return _open(path, path, ort_session.session_settings(provider, threads, kernel), precision, ["loaded as built"])


def _open(
    path: Path,
    source: Path,
    settings: dict[str, Any],
    precision: Precision,
    changes: list[str],
    fusion: Fusion | None = None,
    requested: int | None = None,
) -> OrtEngine:
    """Load the engine in `path`, whose attentions are counted in `source`.

    Args:
        path: the engine.
        source: the graph that it was built from.
        settings: settings of the session.
        precision: numeric precision of the engine.
        changes: what was done to the graph.
        fusion: outcome of fusing the graph.
        requested: number of products to be executed in int8; None: those of the file.
    """
    kernels = ort_session.executed_operators(path, settings, next(fusion_trials(source)))
    counts = [f"{kernels[name]} {name}" for name in _REPORTED if name in kernels]
    fused_attentions = sum(kernels.get(name, 0) for name in ATTENTIONS)
    model = load(source)
    reach = json.loads(model.metadata_props.get(REACH, "{}"))
    fusible = fusible_attentions(model)
    block_sparse = sum(is_block_sparse(node) for node in model.graph)
    if block_sparse:
        by = f" ({kernels.get(NAME, 0)} by the kernel of {settings['kernel']})" if "kernel" in settings else ""
        counts.insert(0, f"{block_sparse} block-sparse attentions{by}")
    if counts:
        changes = [*changes, f"runs {', '.join(counts)}"]
    return OrtEngine(
        path=path,
        precision=precision,
        # A graph that was fused elsewhere may hold attentions that only the runtime recognizes.
        attentions=max(len(fusible), fused_attentions),
        fused=fused_attentions,
        kernels=kernels,
        optimization="; ".join(changes),
        session=settings,
        fusion=fusion,
        reach=reach,
        quantized=_quantized(path, kernels, requested) if precision == "int8" else None,
        _session=ort_session.open_session(path, settings),
    )


def _sized_feeds(path: Path, batch: int, seq: int) -> dict[str, np.ndarray]:
    """Inputs of a size; a batch size that the graph fixes is kept."""
    model = load(path)
    return trial_feeds(model, fixed_batch(model) or batch, seq)


def _precision(model: ir.Model) -> Precision:
    """Numeric precision of a graph that `build_engine` wrote."""
    if any(node.op_type in (*INT8_KERNELS, "DequantizeLinear") for node in model.graph):
        return "int8"
    weights = model.graph.initializers.values()
    return "fp16" if any(value.dtype == ir.DataType.FLOAT16 for value in weights) else "fp32"


def _quantized(path: Path, kernels: Mapping[str, int], requested: int | None) -> QuantizedProducts:
    """The products of an engine in int8.

    Args:
        path: the engine.
        kernels: number of executed operators by type.
        requested: number of products to be executed in int8; None: those of the file.
    """
    model = load(path)
    integer = [node for node in model.graph if node.op_type in INT8_KERNELS]
    return QuantizedProducts(
        requested=len(integer) + len(quantized_products(model)) if requested is None else requested,
        executed=sum(count for kernel, count in kernels.items() if kernel in INT8_KERNELS),
        float_in_graph=tuple(node.name or "" for node in float_products(model)),
        float_widths=float_widths_of(model),
    )


def _spec(tensor: NodeArg) -> TensorSpec:
    """An input of a session, whose type reads like `tensor(float16)`."""
    dims = tuple(size if isinstance(size, int) else FREE for size in tensor.shape)
    return TensorSpec(tensor.name, _element_type(tensor.type), dims)


def _element_type(text: str) -> ir.DataType:
    name = text.removeprefix("tensor(").removesuffix(")")
    return ir.DataType[name.upper()]
