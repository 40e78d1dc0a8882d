"""Measurements: interleaved times, multiply-accumulates, paired bootstrap intervals."""

from compressor.measure.bench import BenchResult, bench, facts, file_bytes, require_run
from compressor.measure.bench_folder import bench_folder
from compressor.measure.bootstrap import Interval, paired_interval
from compressor.measure.macs import macs
from compressor.measure.quiet_timer import QuietTimer
from compressor.measure.timing import interleave, median_times, saved_share

__all__ = [
    "BenchResult",
    "Interval",
    "QuietTimer",
    "bench",
    "bench_folder",
    "facts",
    "file_bytes",
    "interleave",
    "macs",
    "median_times",
    "paired_interval",
    "require_run",
    "saved_share",
]
