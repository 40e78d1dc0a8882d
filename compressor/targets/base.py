"""What a runtime gives back: an engine that runs, and the facts about the graph that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from compressor.results import EngineBuild

Precision = Literal["fp32", "fp16", "bf16"]
Provider = Literal["cpu", "cuda"]
Feeds = Mapping[str, np.ndarray]
"""One batch: array by name of graph input."""

TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Largest relative error at which an engine still computes the function of its graph; bfloat16 has three bits less than
half precision."""

Span = tuple[int, int, int]
"""Least, usual and most of a size."""


@dataclass(frozen=True)
class BuildOptions:
    """What one runtime or another can make use of: sizes and limits, where it builds its engines for them (TensorRT).

    Attributes:
        batch, seq: sizes of the first axis, and of the other free axes; an engine is fastest at the usual ones.
        memory: length of the memories and caches, where the graph has any.
        workspace: bytes that building may take on the device; None: all there are.
        timing_cache: file that the times of kernels are kept in and taken from; None: one in the user's cache.
        hardware_compatible: the engine shall run on other GPUs too, from Ampere on.
        version_compatible: the engine shall run with later versions too, of the same major version.
        kernel: library that ONNX Runtime on the CPU computes block-sparse attention with; None: the graph's function.
    """

    batch: Span = (1, 8, 8)
    seq: Span = (1, 128, 128)
    memory: Span = (0, 0, 0)
    workspace: int | None = None
    timing_cache: Path | None = None
    hardware_compatible: bool = False
    version_compatible: bool = False
    kernel: Path | None = None


def span(usual: Iterable[int], also: Iterable[int] = ()) -> Span:
    """Least, usual and most of the sizes that an engine takes.

    The usual one is the middle of those that it is built for, the larger of two; those that it must take `also` only
    widen the span.
    """
    sizes = sorted(usual)
    every = (*sizes, *also)
    return min(every), sizes[len(sizes) // 2], max(every)


class Engine(Protocol):
    """One graph, built and loaded.

    Attributes:
        path: the file that the runtime loads.
        inputs, outputs: names of the graph's inputs and outputs, in order.
        precision: numbers that it computes in.
        attentions: attentions that the graph has; a layer whose attention was removed needs none.
        fused: how many of them the runtime executes as one operator each.
        kernels: how many operators of each type the runtime executes.
        optimization: what was done to the graph for this runtime, in one line.
        session: runtime, its version, device and options: all that is needed to build the like again.
        built: what came of building ahead of time; None where the runtime loads the graph as it is.
        device_seconds: what the last run took on the device by its own clock, transfers left out; None: not known.
    """

    @property
    def path(self) -> Path: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def attentions(self) -> int: ...
    @property
    def fused(self) -> int: ...
    @property
    def kernels(self) -> Mapping[str, int]: ...
    @property
    def optimization(self) -> str: ...
    @property
    def session(self) -> Mapping[str, Any]: ...
    @property
    def built(self) -> EngineBuild | None: ...
    @property
    def device_seconds(self) -> float | None: ...

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name. Inputs that the graph does not have are left out."""
        ...

    def memory(self, feeds: Feeds) -> int | None:
        """By how many bytes loading it and running `feeds` grows a fresh process at its peak, or what is taken of the
        device's memory where it has its own; None: cannot be told."""
        ...
