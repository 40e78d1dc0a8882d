"""The goals of `benchmarks.gpu`, and which of them a row misses."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.gpu_graphs import DENSE
from compressor.results import Speed
from compressor.targets import Engine
from graph_passes import load

SHARE, LIGHTER = 0.8, 0.23
"""Minimum share of time saved over share of arithmetic saved, and minimum reduction of the weights at 12 heads."""
FASTER = {72: 0.175, 12: 0.33}
"""Number of heads -> minimum gain in examples per second over dense, from the papers."""
MIN_BATCH = 8
"""Smallest batch to which the goals of speed apply."""


def saved_share(speed: Speed, macs_dense: int, macs_compressed: int) -> float:
    """Share of time saved divided by share of multiply-accumulates removed; 1 if time falls in proportion to them.

    `(1 - p50_compressed / p50_dense) / (1 - macs_compressed / macs_dense)`

    Args:
        speed: times of both engines.
        macs_dense: multiply-accumulates of the dense graph.
        macs_compressed: multiply-accumulates of the compressed graph.

    Raises:
        ValueError: no multiply-accumulates were removed.
    """
    if macs_compressed >= macs_dense:
        raise ValueError(f"{macs_dense} multiply-accumulates before and {macs_compressed} after: none were removed")
    return (1 - 1 / speed.ratio) / (1 - macs_compressed / macs_dense)


@dataclass
class Goals:
    """Goals that were missed, and goals that could not be measured."""

    missed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{title}: {'; '.join(goals)}"
            for title, goals in (("missed", self.missed), ("unknown", self.unknown))
            if goals
        ]
        return "\n".join(lines) or "every goal reached"


def missed_goals(heads: int, speed: Speed, share: float | None) -> list[str]:
    """The goals that a row misses.

    Args:
        heads: number of heads of the compressed engine.
        speed: the row.
        share: share of time saved over share of arithmetic saved; None: unknown.
    """
    missed = [] if speed.void is None else [speed.void]
    if heads == DENSE or speed.batch < MIN_BATCH:
        return missed
    if share is not None and share < SHARE:
        missed.append(f"share {share:.2f}")
    if (faster := device_ratio(speed) - 1) < FASTER[heads]:
        missed.append(f"{faster:.1%} faster")
    return missed


def device_ratio(speed: Speed) -> float:
    """Dense over compressed median time, by the device's clock where it is known."""
    dense, compressed = speed.dense.device, speed.compressed.device
    return speed.ratio if dense is None or compressed is None else dense[0] / compressed[0]


def time_share(speed: Speed, dense: int | None, compressed: int | None) -> float | None:
    """Share of time saved over share of arithmetic saved; None where none was saved, or the numbers are unknown.

    Args:
        speed: the row.
        dense: multiply-accumulates of the dense graph.
        compressed: multiply-accumulates of the compressed graph.
    """
    if dense is None or compressed is None or dense == compressed:
        return None
    return saved_share(speed.model_copy(update={"ratio": device_ratio(speed)}), dense, compressed)


def weight_change(dense: Engine, compressed: Engine) -> tuple[str, float]:
    """The reduction of the weights: a description with both sizes, and the share.

    The sizes are those of the weights on the device, or of the files where TensorRT does not report them.
    """
    name, sizes = "weights of the engine", [weight_bytes(engine) for engine in (dense, compressed)]
    if None in sizes:
        name, sizes = "file of the engine", [engine.path.stat().st_size for engine in (dense, compressed)]
    before, after = (size or 0 for size in sizes)
    return f"{name}, {before / 1e6:.1f} to {after / 1e6:.1f} MB", 1 - after / before


def weight_bytes(engine: Engine) -> int | None:
    """Bytes of an engine's weights; None where the runtime does not report them."""
    if engine.built is not None:
        return engine.built.weight_bytes
    weights = load(engine.path).graph.initializers.values()
    return sum(value.const_value.nbytes for value in weights if value.const_value)
