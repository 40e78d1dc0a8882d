"""Time engines while the machine is undisturbed, as far as a control engine can tell."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from compressor.measure.timing import median_times
from compressor.targets.base import Engine, Feeds

EXCESS = 1.03
"""Ratio of the control's time to its fastest from which on the machine counts as disturbed."""
PATIENCE_SECONDS = 90.0
"""Seconds that engines are timed before the control's new speed counts as that of the machine."""


@dataclass(frozen=True)
class QuietTimer:
    """Times engines again while a control, which is timed in turn with them, is slower than it was before.

    Virtual machines have phases of many seconds in which caches or cores are shared with others. Small engines lose far
    more in them than large ones, so that ratios of engines change too. A phase that outlasts all attempts counts as the
    speed of the machine from then on.

    Attributes:
        timed: times engines, as `median_times`.
    """

    timed: Callable[[Sequence[Engine], Feeds, float], list[float]] = median_times
    _fastest: dict[tuple[str, Hashable], float] = field(default_factory=dict, repr=False)

    def medians(self, engines: Sequence[Engine], feeds: Feeds, seconds: float, size: Hashable) -> list[float]:
        """Median seconds of a call of each engine, of the attempt in which the control was fastest.

        Args:
            engines: the engines; the first one is the control.
            feeds: one batch of inputs.
            seconds: approximate duration of an attempt.
            size: size of the inputs, which the control's times belong to.
        """
        key = (str(engines[0].path), size)
        attempts: list[list[float]] = []
        while len(attempts) < max(2, round(PATIENCE_SECONDS / seconds)):
            attempts.append(self.timed(engines, feeds, seconds))
            control = attempts[-1][0]
            fastest = self._fastest.setdefault(key, control)
            if control <= EXCESS * fastest:
                self._fastest[key] = min(fastest, control)
                return attempts[-1]
        best = min(attempts, key=lambda times: times[0])
        self._fastest[key] = best[0]
        return best
