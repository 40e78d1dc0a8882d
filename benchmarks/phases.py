"""Print the speed of a large and a small engine over time: whether other machines disturb this one.

    python -m benchmarks.phases build/run                # a finished run for OpenVINO or ONNX Runtime, one minute
    python -m benchmarks.phases build/run --minutes 3

Every row has the median times, over a few seconds, of ONNX Runtime's fused fp32 engine of MiniLM and of the engine of
a run on the same inputs, in turn. On an undisturbed machine all rows are alike. The largest time of each engine is
divided by its smallest at the end.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from benchmarks.quantization import ENCODER, reference_engine
from benchmarks.speed import table
from compressor.measure import median_times
from compressor.model_folder import example_inputs, load
from compressor.targets import target

SECONDS = 3.0
"""Duration of a row."""


def main() -> None:
    """Print a row for every few seconds, and the range of each engine's times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run on the model of ../shared/models")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('onnxruntime', 'openvino')}", flush=True)
    runtime = "openvino" if (args.run / target("openvino").engine_file).exists() else "ort"
    dense = target("ort").load(reference_engine(ENCODER, args.seq, args.out / "sst2"))
    small = target(runtime).load(args.run / target(runtime).engine_file)
    feeds = {key: value.numpy() for key, value in example_inputs(load(ENCODER), args.batch, args.seq).items()}
    start, times = time.perf_counter(), []
    while time.perf_counter() - start < 60 * args.minutes:
        begin = time.perf_counter() - start
        times.append([1e3 * seconds for seconds in median_times([dense, small], feeds, SECONDS)])
        row = {"seconds": f"{begin:.0f}", "dense, ms": f"{times[-1][0]:.2f}", "run, ms": f"{times[-1][1]:.2f}"}
        print(table([row]).splitlines()[-1], flush=True)
    slowest, fastest = np.max(times, axis=0), np.min(times, axis=0)
    print(f"\nlargest over smallest time: dense {slowest[0] / fastest[0]:.2f}, run {slowest[1] / fastest[1]:.2f}")


if __name__ == "__main__":
    main()
