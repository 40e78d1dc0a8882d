"""A graph or an engine loaded here, as a driver."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError, UsageError
from compressor.measure.timing import wait_until_idle
from compressor.targets import BuildOptions, Engine, target
from compressor.targets.base import Feeds, Precision
from compressor.targets.cuda import driver
from compressor.targets.onnxruntime.ort_session import PROVIDERS
from compressor.targets.random_inputs import random_feeds
from compressor.targets.tensor_specs import FREE, TensorSpec, inputs_of
from graph_passes import load

_PLANS = (".plan", ".engine")


class LocalEngine:
    """An ONNX file, built for this machine and loaded; or a TensorRT engine.

    Args:
        path: the file; one that `compress` built for ONNX Runtime (`engine.onnx`) is loaded as it is.
        scratch: folder of its own for what the build writes.
        threads: of one call; None: one a core.
        kernel: library that block-sparse attention is computed with; None: the graph's own function.

    Attributes:
        graph: the graph whose function it has to compute.
    """

    at_once = 4

    def __init__(self, path: Path, scratch: Path, threads: int | None = None, kernel: Path | None = None) -> None:
        if not path.is_file():
            raise InputError(f"{path}: there is no such file; give an ONNX file, or a model's name with --server")
        self.name, self.graph = str(path), path
        self._turn: AbstractContextManager[Any] = nullcontext()
        self._engine: Engine
        if path.suffix in _PLANS:
            if kernel is not None:
                raise UsageError(
                    f"--kernel {kernel}: is for ONNX Runtime, and {path} is a TensorRT engine; leave it out"
                )
            from compressor.targets.tensorrt import target as trt

            plan = trt.load(path)
            papers = plan.metadata
            self.precision: Precision = papers.precision
            self._engine, self.graph = plan, path.with_name("model.onnx")
            self._turn = threading.Lock()  # it has one context, which one thread at a time may use
            self.inputs = tuple(
                TensorSpec(name, ir.DataType.from_numpy(np.dtype(papers.inputs[name])), _free(least, most))
                for name, (least, _, most) in papers.profiles.items()
            )
            self.host = f"{plan.session['runtime']} on {driver().device}"
        else:
            model = load(path)
            half = any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.initializers.values())
            self.precision = "fp16" if half else "fp32"
            self._engine = target("ort")(
                path, scratch / "engine.onnx", threads=threads, tuning=BuildOptions(kernel=kernel)
            )
            self.inputs = inputs_of(model, path)
            session = self._engine.session
            where = str(driver().device) if session["provider"] == PROVIDERS["cuda"] else session["provider"]
            self.host = f"{session['runtime']} on {where}, {session['intra_op_threads']} threads"
            if kernel is not None:
                self.host += ", compiled kernel"

    @cached_property
    def _described(self) -> ir.Model:
        """The graph, which says what inputs are valid."""
        return load(self.graph)

    def draw(self, batch: int, seq: int, seed: int) -> Feeds:
        feeds = random_feeds(self._described, batch, seq, seed=seed)
        return {tensor.name: feeds[tensor.name].astype(tensor.numpy) for tensor in self.inputs}

    def prepare(self, feeds: Feeds) -> Feeds:
        return feeds

    def call(self, prepared: Feeds) -> dict[str, np.ndarray]:
        with self._turn:
            return self._engine.run(prepared)

    answers = call

    def rest(self) -> None:
        wait_until_idle()


def _free(least: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    return tuple(FREE if low != high else low for low, high in zip(least, most, strict=True))
