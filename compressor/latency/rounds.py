"""Times of rounds, and the slowdown that they show: of whole calls, or of the tokens of streams."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from compressor.latency.streams import PROMPTS, Stream, TokenSource, read_stream
from compressor.latency.verdict import Slowdown
from compressor.measure.timing import CONFIDENCE, Clock, ratio_interval

_RESAMPLES = 2000


class RoundTimes:
    """Milliseconds of calls, one array `[call]` per round.

    Args:
        saved: rounds of a baseline that was measured earlier; None: both sides are measured in turn.

    Attributes:
        model: the rounds of the model.
        baseline: the rounds of the baseline.
        interleaved: whether rounds of model and baseline alternate.
    """

    def __init__(self, saved: Sequence[np.ndarray] | None = None) -> None:
        self.model: list[np.ndarray] = []
        self.baseline: list[np.ndarray] = list(saved or ())
        self.interleaved = saved is None

    def add(self, pair: np.ndarray) -> None:
        """Add two rounds `[2, call]`: of model and baseline, or both of the model where the baseline is saved."""
        self.model.append(pair[0])
        (self.baseline if self.interleaved else self.model).append(pair[1])

    def slowdown(self, limit: float, seed: int) -> Slowdown | None:
        """The slowdown over all rounds; None before the first."""
        if not self.model:
            return None
        model, baseline = np.stack(self.model), np.stack(self.baseline)
        if self.interleaved:
            low, high = ratio_interval(np.stack([model, baseline]), seed)
        else:
            low, high = _unpaired_interval(model, baseline, seed)
        ratio = float(np.median(model) / np.median(baseline))
        (baseline_p50, baseline_p99), (model_p50, model_p99) = (
            np.quantile(side, [0.5, 0.99]) for side in (baseline, model)
        )
        return Slowdown(
            baseline_p50=baseline_p50,
            model_p50=model_p50,
            baseline_p99=baseline_p99,
            model_p99=model_p99,
            slowdown=ratio - 1,
            low=min(low, ratio) - 1,
            high=max(high, ratio) - 1,
            confidence=CONFIDENCE,
            limit=limit,
            rounds=len(model),
            calls=model.shape[1],
            interleaved=self.interleaved,
        )


def _unpaired_interval(model: np.ndarray, baseline: np.ndarray, seed: int) -> tuple[float, float]:
    """Bootstrap bounds of the ratio of medians of two sides that were measured at different times."""
    rng = np.random.default_rng(seed)
    # The medians of all draws at once would take gigabytes for many long rounds.
    medians = [
        np.array([np.median(side[draw]) for draw in rng.integers(0, len(side), (_RESAMPLES, len(side)))])
        for side in (model, baseline)
    ]
    low, high = np.quantile(medians[0] / medians[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


class StreamTimes:
    """Times of the streams of two sources, in pairs of rounds.

    Attributes:
        first: milliseconds to the first token.
        token: milliseconds per further token.
    """

    def __init__(self, sources: Sequence[TokenSource], clock: Clock = time.perf_counter) -> None:
        self.first, self.token = RoundTimes(), RoundTimes()
        self._sources, self._clock = sources, clock
        self._streams: tuple[list[Stream], list[Stream]] = ([], [])
        self._gaps: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])

    def callers(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """For each source a function that reads the stream of the next prompt."""

        def caller(source: TokenSource, streams: list[Stream]) -> Callable[[], object]:
            # Servers keep what they have computed for a prompt, so each one is new.
            numbers = itertools.count(PROMPTS)
            return lambda: streams.append(read_stream(source, source.prompt(next(numbers)), self._clock))

        first, second = zip(self._sources, self._streams, strict=True)
        return caller(*first), caller(*second)

    def add(self, pair: np.ndarray) -> None:
        """Add two rounds `[2, call]`, whose streams are the last ones that were read."""
        rounds = [streams[-pair.shape[1] :] for streams in self._streams]
        self.first.add(np.array([[stream.first for stream in streams] for streams in rounds]))
        self.token.add(np.array([[stream.per_token for stream in streams] for streams in rounds]))
        for gaps, streams in zip(self._gaps, rounds, strict=True):
            gaps.extend(stream.gaps for stream in streams)

    def slowdowns(self, limit: float, seed: int) -> tuple[Slowdown | None, Slowdown | None]:
        """The slowdowns per further token and to the first one; None before the first round.

        The 99th percentiles of further tokens are those of the time between two parts of a text.
        """
        first, token = self.first.slowdown(limit, seed), self.token.slowdown(limit, seed)
        if token is not None:
            model, baseline = (float(np.quantile(np.concatenate(gaps), 0.99)) for gaps in self._gaps)
            token = token.model_copy(update={"model_p99": model, "baseline_p99": baseline})
        return token, first
