"""Times and throughput of two engines."""

from __future__ import annotations

from compressor.results.rows import Row


def size_label(batch: int, seq: int | None) -> str:
    """The size of a batch of inputs: `batch 8, length 128`; `batch 8` for a model of images or sound alone.

    Args:
        batch: number of rows.
        seq: length in tokens; None: the model has one size.
    """
    return f"batch {batch}" + (f", length {seq}" if seq else "")


class Latency(Row):
    """Times of one engine in an interleaved measurement, in milliseconds per call; throughput in rows per second."""

    p50: float
    p90: float
    p99: float
    throughput: float
    samples: tuple[float, ...]
    """Milliseconds of every timed call, in order; the plot shows them."""
    device: tuple[float, float, float] | None = None
    """p50, p90 and p99 by the device's own clock, without transfers; None: the engine does not report them."""


class Speed(Row):
    """Times of the dense and the compressed engine, measured in turn, in one process, on the same inputs.

    `ratio` is dense p50 over compressed p50 (above one: compressed is faster); `low` and `high` are the bounds of its
    bootstrap interval over pairs of rounds. `void` says why the row must not be read as a result, or is None.
    """

    batch: int
    seq: int | None
    """Length in tokens; None for a model of images or sound alone."""
    dense: Latency
    compressed: Latency
    ratio: float
    low: float
    high: float
    confidence: float = 0.95
    void: str | None = None

    @property
    def size_label(self) -> str:
        """The size of the inputs."""
        return size_label(self.batch, self.seq)


class RowRates(Row):
    """Rows per second of one engine: with one caller on all of its threads, and with several callers at once."""

    one_caller: float
    all_callers: float


class Throughput(Row):
    """Rows per second of both engines at one size.

    Each of the `callers`, one per core, has an engine of its own with one thread.
    """

    batch: int
    seq: int | None
    """Length in tokens; None for a model of images or sound alone."""
    callers: int
    dense: RowRates
    compressed: RowRates

    @property
    def size_label(self) -> str:
        """The size of the inputs."""
        return size_label(self.batch, self.seq)
