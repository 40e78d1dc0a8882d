"""Numbers that stand: interleaved times, multiply-accumulates, paired intervals."""

from compressor.measure.bench import Bench, bench, facts, require_run
from compressor.measure.bootstrap import Interval, paired_interval
from compressor.measure.macs import macs
from compressor.measure.timing import interleave, saved_share

__all__ = ["Bench", "Interval", "bench", "facts", "interleave", "macs", "paired_interval", "require_run", "saved_share"]
