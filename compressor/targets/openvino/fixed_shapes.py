"""Graphs that OpenVINO compiles for fixed shapes too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import ErrorCode, InputError
from compressor.targets.base import Feeds
from compressor.targets.openvino.batches import EngineRequest, fitting_shape, pad
from compressor.targets.openvino.session import (
    Layer,
    compile_model,
    executed_layers,
    failure_reason,
    read_model,
    run_request,
    stored_info,
    tensor_names,
)
from compressor.targets.options import Shape, parse_shape
from compressor.targets.peak_memory import resident_bytes

if TYPE_CHECKING:
    import openvino


@dataclass(frozen=True)
class FixedRequest:
    """A graph compiled for one shape.

    Attributes:
        compiled: the graph as OpenVINO compiled it.
        request: runs it.
        seconds: time of compiling it, or of reading it from the cache.
        added_bytes: memory that the process holds more since; None: unknown.
    """

    compiled: openvino.CompiledModel
    request: EngineRequest
    seconds: float
    added_bytes: int | None

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that OpenVINO executes."""
        return tuple(executed_layers(self.compiled))

    def __str__(self) -> str:
        memory = "" if self.added_bytes is None else f", {self.added_bytes / 1e6:.0f} MB"
        return f"{self.seconds:.1f} s{memory}"


def compile_fixed(
    model: openvino.Model,
    shapes: Iterable[Shape],
    path: Path,
    settings: Mapping[str, Any],
    cache: Path | None = None,
) -> dict[Shape, FixedRequest]:
    """Compile a graph for fixed shapes.

    Args:
        model: the graph, with free axes; it stays unchanged.
        shapes: the shapes.
        path: its file, for messages.
        settings: from `session_settings`.
        cache: folder of compiled models; None: the graph is compiled in any case.

    Raises:
        InputError: the graph cannot have one of the shapes.
    """
    requests = {}
    axes = stored_info(model).get("input_axes", {})
    for shape in shapes:
        sizes = dict(zip(("batch", "sequence"), shape, strict=True))
        before, start = resident_bytes(), time.perf_counter()
        fixed = model.clone()
        try:
            fixed.reshape(
                {
                    position: [sizes.get(name) or int(name) for name in axes[tensor]]
                    for position, tensor in enumerate(tensor_names(model).inputs)
                }
            )
        except Exception as error:  # OpenVINO raises RuntimeError and others
            raise InputError(
                f"{path}: the graph cannot have the shape {shape[0]}x{shape[1]} ({failure_reason(error)}); use shorter"
                " --shapes",
                code=ErrorCode.OUT_OF_RANGE,
                path=path,
                shape=shape,
            ) from error
        compiled = compile_model(fixed, path, settings, cache)
        request = EngineRequest(compiled.create_infer_request())
        after = resident_bytes()
        added = None if before is None or after is None else max(0, after - before)
        requests[shape] = FixedRequest(compiled, request, time.perf_counter() - start, added)
    return requests


def runner(path: Path, settings: Mapping[str, Any]) -> Callable[[Feeds], dict[str, np.ndarray]]:
    """A function that runs a graph, which is loaded here and now, with all of its fixed shapes."""
    model = read_model(path)
    request, names = EngineRequest(compile_model(model, path, settings).create_infer_request()), tensor_names(model)
    fixed = compile_fixed(model, map(parse_shape, settings.get("shapes", ())), path, settings)
    info = stored_info(model)
    axes, pads = info.get("input_axes", {}), info.get("pads", False)

    def run(feeds: Feeds) -> dict[str, np.ndarray]:
        shape = fitting_shape(fixed, axes, feeds, pads=pads) if fixed else None
        if shape is None:
            return run_request(request, names, feeds)
        return run_request(fixed[shape].request, names, pad(axes, feeds, shape))

    return run
