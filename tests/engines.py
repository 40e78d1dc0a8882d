"""Graphs and engines for the tests of building, proving and measuring."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir

from compressor.export import export_reference
from compressor.targets import Feeds, Precision
from compressor.units import find_sites
from graph_passes import Plan, load, save, shrink
from tests.zoo import FAMILIES, random_plan


def parsed(body: str, inputs: str, outputs: str, weights: str = "", opset: int = 18) -> ir.Model:
    """A graph from ONNX text; weights that are declared without content are drawn."""
    imports = f'"" : {opset}, "com.microsoft" : 1'
    text = f"<ir_version: 10, opset_import: [{imports}]> g ({inputs}) => ({outputs}) <{weights}> {{ {body} }}"
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for info in proto.graph.value_info:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        content = rng.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(content, info.name))
    del proto.graph.value_info[:]
    return ir.from_proto(proto)


class Pruned:
    """One family with a random plan: `reference` still has every head, `shrunk` only those that are kept."""

    def __init__(self, family: str, seed: int = 1) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.model, inputs = FAMILIES[family](0)
        self.inputs: dict[str, np.ndarray] = {name: value.numpy() for name, value in inputs.items()}
        self.plan: Plan = random_plan(find_sites(self.model, inputs), np.random.default_rng(seed))
        self.reference, self.shrunk = folder / f"{family}-reference.onnx", folder / f"{family}-shrunk.onnx"
        export_reference(self.model, self.plan, inputs, self.reference)
        save(shrink(load(self.reference), self.plan).model, self.shrunk)

    @property
    def attentions(self) -> int:
        """Sites that keep a head."""
        return sum(bool(site.kept) for site in self.plan.sites)


@functools.cache
def pruned(family: str) -> Pruned:
    """The same for every test of this process: an export takes seconds."""
    return Pruned(family)


class FakeEngine:
    """An engine that takes the time it is told to, on a clock of its own."""

    path = Path("fake.onnx")
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    kernels: Mapping[str, int] = MappingProxyType({})
    optimization = "none"
    built = None
    device_seconds: float | None = None

    def __init__(
        self,
        milliseconds: float = 1.0,
        *,
        attentions: int = 1,
        fused: int = 1,
        precision: Precision = "fp32",
        session: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.milliseconds, self.attentions, self.fused = milliseconds, attentions, fused
        self.precision: Precision = precision
        self.session = session
        self.clock: Clock | None = None

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        if self.clock is not None:
            self.clock.calls.append(self)
            self.clock.now += self.milliseconds / 1e3
        return {}

    def memory(self, feeds: Feeds) -> int | None:
        return None


class Clock:
    """Time that passes only while a fake engine runs."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.now = 0.0
        self.calls: list[FakeEngine] = []
        for engine in engines:
            engine.clock = self

    def perf_counter(self) -> float:
        return self.now
