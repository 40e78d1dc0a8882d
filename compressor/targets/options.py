"""The options of a build: sizes that an engine must take, and settings of its runtime."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Shape = tuple[int, int]
"""Batch size and length in tokens."""
Span = tuple[int, int, int]
"""Smallest, usual and largest value of a size."""
Widths = tuple[int, int]
"""Numbers of inputs and outputs of the products with constant weights that multiply the same activations, all outputs
together: the projections of queries, keys and values count as one product."""


@dataclass(frozen=True)
class BuildOptions:
    """Sizes that an engine must take, and settings that only some targets use (`Target.options`).

    Attributes:
        batch: sizes of the first axis; a TensorRT engine is fastest at the usual one.
        seq: sizes of the other free axes, in tokens.
        memory: lengths of memories and caches, where the graph has any.
        workspace: bytes of device memory that the build may use; None: all free memory.
        timing_cache: file of TensorRT's kernel timings, read and updated; None: a file in the user's cache.
        hardware_compatible: build a TensorRT engine that runs on other GPUs too, from Ampere on.
        version_compatible: build a TensorRT engine that later versions run too.
        kernel: library of `compress kernel`, for block-sparse attention in ONNX Runtime on the CPU; None: plain ONNX.
        shapes: batch sizes and lengths that OpenVINO compiles the graph for, besides free axes.
        free_axes: whether OpenVINO compiles the graph for free axes too when it builds the engine; False: when a batch
            has none of the `shapes`.
        split_norms: whether ONNX Runtime's fused normalizations are split; None: where that is faster.
        norm_seconds: time spent on finding that out; 0: they stay fused.
        float_widths: widths of the products that an int8 engine computes in floats, because int8 is slower there.
        float_precision: precision in which an int8 engine of OpenVINO computes what is in floats.
    """

    batch: Span = (1, 8, 8)
    seq: Span = (1, 128, 128)
    memory: Span = (0, 0, 0)
    workspace: int | None = None
    timing_cache: Path | None = None
    hardware_compatible: bool = False
    version_compatible: bool = False
    kernel: Path | None = None
    shapes: tuple[Shape, ...] = ()
    free_axes: bool = True
    split_norms: bool | None = None
    norm_seconds: float = 0.0
    float_widths: frozenset[Widths] = frozenset()
    float_precision: Literal["fp32", "bf16"] = "fp32"


def parse_shape(text: str) -> Shape:
    """Batch size and length of a shape such as `1x128`."""
    batch, seq = text.split("x")
    return int(batch), int(seq)


def span(usual: Iterable[int], also: Iterable[int] = ()) -> Span:
    """The span of sizes that an engine must take.

    Args:
        usual: sizes that the engine is optimized for; their median (the larger one of two) becomes the usual size.
        also: further sizes that the engine must take, which only widen the span.
    """
    sizes = sorted(usual)
    total = (*sizes, *also)
    return min(total), sizes[len(sizes) // 2], max(total)
