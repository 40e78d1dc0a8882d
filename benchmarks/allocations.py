"""Compare units that are allocated by measured time with units allocated by multiply-accumulates, at equal loss.

    python -m benchmarks.allocations sst2               # OpenVINO in int8, 1 x 128 and 8 x 128
    python -m benchmarks.allocations sst2 --engine ort

The model is that of `benchmarks.quantization`; losses and the cost table are those of `benchmarks.latencies`. For each
share of the multiply-accumulates, units are allocated within that share, which gives a loss. The least time for which
the table allows no more loss is found by bisection. The engines of both plans are built, and timed in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.latencies import ENGINES, Timing, prepare
from benchmarks.machine import machine
from benchmarks.speed import table
from benchmarks.text_sets import SETS
from compressor.cli.console import Console
from compressor.measure import median_times
from compressor.measure.costs import CostTable
from compressor.progress import RunLog
from compressor.pruning.allocate import Constraint, choose_counts
from compressor.pruning.costs import keep_counts
from compressor.workdir import open_workdir

SIZES = ((1, 128), (8, 128))
SHARES = (2 / 3, 0.5, 0.4, 1 / 3, 0.25)
STEPS = 20
"""Halvings of the interval of times."""


def loss_of(timing: Timing, counts: Mapping[str, int]) -> float:
    """The sum of the losses of the groups."""
    return sum(timing.losses[name][count] for name, count in counts.items())


def fastest(timing: Timing, costs: CostTable, loss: float) -> dict[str, int]:
    """The units of least predicted time that lose no more than a plan does."""
    groups = timing.costs.groups
    low, high = costs.least, costs.whole
    counts = choose_counts(groups, timing.losses, [Constraint(costs, high)])
    for _ in range(STEPS):
        middle = (low + high) / 2
        attempt = choose_counts(groups, timing.losses, [Constraint(costs, middle)])
        if loss_of(timing, attempt) <= loss:
            counts, high = attempt, middle
        else:
            low = middle
    return counts


def compare(timing: Timing, costs: CostTable, share: float, seconds: float) -> dict[str, Any]:
    """Allocate both ways, build both engines, time them in turn, and return a row of the table."""
    groups, engines = timing.costs.groups, timing.costs.engines
    by_macs = choose_counts(groups, timing.losses, [Constraint(timing.macs, share * timing.macs.whole)])
    by_time = fastest(timing, costs, loss_of(timing, by_macs))
    built = [engines.build(keep_counts(engines.plan, groups, counts)) for counts in (by_macs, by_time)]
    medians = median_times(built, timing.costs.inputs[costs.size], seconds)
    for engine in built:
        engines.discard(engine)

    def units(counts: Mapping[str, int]) -> str:
        kinds = {group.name: group.type for group in groups}
        sums = (sum(count for name, count in counts.items() if kinds[name] == kind) for kind in ("heads", "neurons"))
        return ", ".join(map(str, sums))

    return {
        "size": f"{costs.batch} x {costs.seq}",
        "multiply-accumulates": f"{share:.0%}",
        "by multiply-accumulates": units(by_macs),
        "by time": units(by_time),
        "loss": f"{loss_of(timing, by_macs):.4f}, {loss_of(timing, by_time):.4f}",
        "predicted, ms": f"{costs.cost(by_macs):.2f}, {costs.cost(by_time):.2f}",
        "p50, ms": ", ".join(f"{1e3 * median:.2f}" for median in medians),
        "times faster by time": f"{medians[0] / medians[1]:.3f}",
    }


def main() -> None:
    """Print the table of an engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(SETS))
    parser.add_argument("--engine", choices=list(ENGINES), default="openvino")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of multiply-accumulates")
    parser.add_argument("--seconds", type=float, default=12.0, help="approximate time of each comparison")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}; seed 0", flush=True)
    folder = args.out / args.name
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with open_workdir(folder / f"allocations-{args.engine}", force=True) as work:
        timing = prepare(args.engine, args.name, folder, work.scratch, RunLog(Console()), SIZES)
        for costs in timing.tables:
            for share in args.shares:
                rows.append(compare(timing, costs, share, args.seconds))
                print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
