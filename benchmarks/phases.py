"""Print the speed of a large and a small engine over time: whether other machines disturb this one.

    python -m benchmarks.phases build/int8 build/half    # finished runs for OpenVINO or ONNX Runtime, one minute
    python -m benchmarks.phases build/int8 build/half --minutes 3 --threads 1

Every row has the median times, over a few seconds, of ONNX Runtime's fused fp32 engine of MiniLM and of the engines of
the runs on the same inputs, in turn. On an undisturbed machine all rows are alike. The end has the standard deviation
over rows of the logarithm of each time, and of two ratios: the ratio of the medians to dense, and the median ratio of
neighbouring rounds to the engine of the first run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from benchmarks.quantization import reference_engine
from benchmarks.speed import table
from benchmarks.text_sets import ENCODER
from compressor.measure import median_times, paired_times
from compressor.model_folder import example_inputs, load
from compressor.targets import target


def main() -> None:
    """Print a row for every few seconds, and how far the rows differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs on the model of ../shared/models")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a row, half of it for each ratio")
    parser.add_argument("--threads", type=int, help="threads of each engine")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('onnxruntime', 'openvino')}", flush=True)
    dense = target("ort").load(reference_engine(ENCODER, args.seq, args.out / "sst2"), threads=args.threads)
    engines = [dense]
    for run in args.runs:
        runtime = target("openvino" if (run / target("openvino").engine_file).exists() else "ort")
        engines.append(runtime.load(run / runtime.engine_file, threads=args.threads))
    feeds = {key: value.numpy() for key, value in example_inputs(load(ENCODER), args.batch, args.seq).items()}
    start, medians, ratios = time.perf_counter(), [], []
    while time.perf_counter() - start < 60 * args.minutes:
        begin = time.perf_counter() - start
        medians.append(np.array(median_times(engines, feeds, args.seconds / 2)))
        paired = np.array(paired_times(engines[1:], feeds, args.seconds / 2))
        ratios.append(paired / paired[0])
        row = {"seconds": f"{begin:.0f}", **_columns(args.runs, 1e3 * medians[-1], "{:.2f}")}
        print(table([row]).splitlines()[-1], flush=True)
    times = np.array(medians)
    print("\nstandard deviation of the logarithm:\n")
    spreads = {
        "time": times,
        "ratio of medians to dense": times / times[:, :1],
        "ratio of rounds to the first run": np.hstack([times[:, 1:2] / times[:, :1], np.array(ratios)]),
    }
    rows = [{"": name, **_columns(args.runs, np.log(values).std(axis=0), "{:.1%}")} for name, values in spreads.items()]
    rows[2]["dense"] = ""
    print(table(rows))


def _columns(runs: list[Path], values: np.ndarray, form: str) -> dict[str, str]:
    """A value of each engine by its name."""
    names = ["dense", *(run.name for run in runs)]
    return {name: form.format(value) for name, value in zip(names, values.tolist(), strict=True)}


if __name__ == "__main__":
    main()
