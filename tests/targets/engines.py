"""Engines without a runtime, on a clock that advances only with their calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from compressor.results import QuantizedProducts
from compressor.targets import Engine, Feeds, Precision
from compressor.targets.tensor_specs import TensorSpec


class FakeEngine(Engine):
    """An engine without outputs whose calls take a given time on a `FakeClock`.

    Args:
        milliseconds: duration of a call.
        attentions: as `Engine.attentions`.
        fused: as `Engine.fused`.
        precision: as `Engine.precision`.
        session: as `Engine.session`.
    """

    path = Path("fake.onnx")
    specs: tuple[TensorSpec, ...] = ()
    host = "a test"
    is_reentrant = True
    outputs: tuple[str, ...] = ()
    kernels: Mapping[str, int] = MappingProxyType({})
    optimization = "none"
    quantized: QuantizedProducts | None = None
    products: Mapping[str, int] = MappingProxyType({})
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
        self.clock: FakeClock | None = None

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Advance the clock."""
        if self.clock is not None:
            self.clock.calls.append(self)
            self.clock.now += self.milliseconds / 1e3
        return {}

    def memory(self, feeds: Feeds) -> int | None:
        """None: unknown."""
        return None


class NoisyEngine(FakeEngine):
    """An engine whose calls take scattered times, with a rare one that takes long.

    Args:
        milliseconds: median duration of a call.
        seed: of the times.
    """

    def __init__(self, milliseconds: float, seed: int) -> None:
        super().__init__(milliseconds)
        self.median, self.rng = milliseconds, np.random.default_rng(seed)

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Advance the clock."""
        self.milliseconds = self.median * self.rng.lognormal(0, 0.1) * (20 if self.rng.random() < 0.02 else 1)
        return super().run(feeds)


class FakeClock:
    """A clock that advances only while its engines run.

    Args:
        engines: those that advance it.

    Attributes:
        now: seconds.
        calls: the engine of every call, in order.
    """

    def __init__(self, *engines: FakeEngine) -> None:
        self.now = 0.0
        self.calls: list[FakeEngine] = []
        for engine in engines:
            engine.clock = self

    def read(self) -> float:
        """Seconds."""
        return self.now
