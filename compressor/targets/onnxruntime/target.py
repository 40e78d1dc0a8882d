"""ONNX Runtime: on CUDA where there is one, else on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError
from compressor.targets.base import BuildOptions, Feeds, Precision, Provider
from compressor.targets.onnxruntime import fusion, ort_session
from compressor.targets.peak_memory import peak_growth
from graph_passes import find_attention, load
from graph_passes.block_sparse.function import DOMAIN, NAME
from graph_passes.block_sparse.masks import REACH
from graph_passes.passes import Normalize

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

ATTENTIONS = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
"""Operators that are one whole attention each."""
_WORTH_TELLING = (
    *ATTENTIONS,
    *("Softmax", "LayerNormalization", "SimplifiedLayerNormalization", "ReduceMean"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "BiasGelu", "FastGelu", "Gelu", "Erf"),
)


@dataclass(frozen=True)
class OrtEngine:
    """A graph loaded into ONNX Runtime; see `Engine` for the attributes."""

    path: Path
    precision: Precision
    attentions: int
    fused: int
    kernels: Mapping[str, int]
    optimization: str
    session: Mapping[str, Any]
    _loaded: InferenceSession = field(repr=False)
    _reach: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(value.name for value in self._loaded.get_inputs())

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(value.name for value in self._loaded.get_outputs())

    @property
    def built(self) -> None:
        return None

    @property
    def device_seconds(self) -> None:
        return None

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        for name, most in self._reach.items():
            # On a GPU the runtime would read past the mask's end and say nothing.
            if name in feeds and feeds[name].shape[1] > most:
                raise InputError(
                    f"{name}: {feeds[name].shape[1]} positions, the masks reach over {most}; give shorter rows, or"
                    " learn masks on longer ones (--max-length)"
                )
        return ort_session.run(self._loaded, feeds)

    def memory(self, feeds: Feeds) -> int | None:
        return peak_growth(self.path, self.session, feeds)


def check(provider: Provider | None, precision: Precision, kernel: Path | None = None) -> None:
    """Raise what `build` would for want of a device or a kernel."""
    ort_session.describe(ort_session.choose(provider, precision, kernel), None, kernel)


def build(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
    tuning: BuildOptions | None = None,
) -> OrtEngine:
    """Fuse a graph for ONNX Runtime, load it, and count what it executes. See `Build`."""
    kernel = tuning.kernel if tuning else None
    chosen = ort_session.choose(provider, precision, kernel)
    options = ort_session.describe(chosen, threads, kernel)
    done = fusion.fuse(onnx, out, options)
    if precision == "fp16":
        from graph_passes.passes.fp16 import halve

        halve(out)
        done += "; converted to half precision, inputs and outputs left as they were"
    kernels = ort_session.executed(out, options, next(fusion.trial_feeds(onnx)))
    told = ", ".join(f"{kernels[name]} {name}" for name in _WORTH_TELLING if name in kernels)
    fused = sum(kernels.get(name, 0) for name in ATTENTIONS)
    model = load(onnx)
    reach = json.loads(model.metadata_props.get(REACH, "{}"))
    sparse = without_block_sparse(model)
    Normalize()(model)
    # A graph that came fused may hold attentions in forms that only the runtime tells apart.
    attentions = max(len(find_attention(model)), fused)
    if sparse:
        native = kernels.get(NAME, 0)
        by = f" ({native} by the kernel of {options['kernel']})" if "kernel" in options else ""
        told = f"{sparse} block-sparse attentions{by}, {told}"
    loaded = ort_session.open_session(out, options)
    return OrtEngine(
        path=out,
        precision=precision,
        attentions=attentions,
        fused=fused,
        kernels=kernels,
        optimization=f"{done}; runs {told}" if told else done,
        session=options,
        _loaded=loaded,
        _reach=reach,
    )


def without_block_sparse(model: ir.Model) -> int:
    """Take the calls of block-sparse attention out, a stand-in of the same shape in their place; how many there were.

    Its products are none that the runtime could have fused.
    """
    calls = [node for node in model.graph if node.domain == DOMAIN]
    for node in calls:
        stand_in = ir.node("Identity", [node.inputs[0]])
        model.graph.insert_before(node, stand_in)
        node.outputs[0].replace_all_uses_with(stand_in.outputs[0])
        model.graph.remove(node, safe=True)
    return len(calls)
