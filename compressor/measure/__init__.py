"""Measurements: interleaved times, multiply-accumulates, paired bootstrap intervals."""

from compressor.measure.bench import bench, bench_folder, require_run
from compressor.measure.bootstrap import paired_interval
from compressor.measure.engine_facts import facts, file_bytes
from compressor.measure.macs import macs
from compressor.measure.timing import interleave, median_times, paired_ratios, paired_times

__all__ = [
    "bench",
    "bench_folder",
    "facts",
    "file_bytes",
    "interleave",
    "macs",
    "median_times",
    "paired_interval",
    "paired_ratios",
    "paired_times",
    "require_run",
]
