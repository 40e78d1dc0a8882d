"""Prune MiniLM under budgets on several tasks, and print what each plan loses and how fast its engines are.

    python -m benchmarks.budgets sst2                     # by reconstruct: half and a third of the multiply-accumulates
    python -m benchmarks.budgets sst2 cola stsb --methods reconstruct fisher magnitude --engines ort
    python -m benchmarks.budgets sst2 --size large        # three seeds, five budgets
    python -m benchmarks.budgets sst2 --latencies 10      # drawn latencies: requested, predicted, measured afresh

Starting models are those of `benchmarks.quantization`. Each row of a table is one run of `compress`, a folder under
`--out`; finished runs are not repeated. Statistics, loss curves and cost tables are shared between runs. Engines are
timed in fresh processes, in turn with ONNX Runtime's own fused engine of the whole model in fp32. Metrics are
those of the engines on test rows, with paired 95% intervals.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.quantization import SETS, reference_engine, repeated, rows_file, run, starting_model
from benchmarks.speed import table
from compressor.config.run import Recipe
from compressor.results import Report
from compressor.targets import target

SIZES = {"small": ((0.5, 1 / 3), 1), "large": ((2 / 3, 0.5, 0.4, 1 / 3, 0.25), 3)}
"""Shares of multiply-accumulates, and number of seeds."""
ENGINES = {"ort": ("ort", "fp32"), "openvino": ("openvino", "int8")}
METHODS = ("reconstruct", "fisher", "magnitude")
LATENCY_SIZES = ((1, 64), (1, 128), (8, 128), (1, 384))


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        engine: key of `ENGINES`.
        method: the method that prunes.
        seed: seed of the rows that are drawn.
        budget: the options that set the budget.
        size: batch size and length at which latencies are requested; None: 128 tokens at batch 1 and 8.
    """

    engine: str
    method: str
    seed: int
    budget: dict[str, Any]
    size: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        budget = "-".join(f"{key}{value:.3g}" for key, value in self.budget.items())
        size = "" if self.size is None else f"-{self.size[0]}x{self.size[1]}"
        return f"{self.engine}-{self.method}-{budget}-seed{self.seed}{size}"


def report_of(cell: Cell, name: str, model: Path, folder: Path) -> Report:
    """The report of a cell, which runs if it has not."""
    runtime, precision = ENGINES[cell.engine]
    length = SETS[name].max_length
    batch, seq = ((1, 8), (length,)) if cell.size is None else ((cell.size[0],), (cell.size[1],))
    shapes = tuple(f"{rows}x{tokens}" for rows in batch for tokens in seq) if runtime == "openvino" else ()
    recipe: dict[str, Any] = {
        "model": model,
        "data": str(rows_file(name, folder)),
        "max_length": length,
        "metric": SETS[name].metric,
        "method": cell.method,
        "target": runtime,
        "precision": precision,
        "batch": batch,
        "seq": seq,
        "shapes": shapes,
        "seconds": 3.0,
        "seed": cell.seed,
        "statistics": folder / "statistics",
        "out": folder / "budgets" / cell.name,
        **cell.budget,
    }
    return run(Recipe(**recipe))


def print_losses(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print the table of one set: plans by multiply-accumulates."""
    model = starting_model(name, folder)
    length = SETS[name].max_length
    reference = reference_engine(model, length, folder)
    shares, seeds = SIZES[args.size]
    rows = []
    for engine, method, share in itertools.product(args.engines, args.methods, args.shares or shares):
        cells = [Cell(engine, method, seed, {"macs": share}) for seed in range(seeds)]
        reports = [report_of(cell, name, model, folder) for cell in cells]
        differences = [100 * (report.scores[0].compressed - report.scores[0].dense) for report in reports]
        first = reports[0].scores[0]
        engine_file = folder / "budgets" / cells[0].name / target(ENGINES[engine][0]).engine_file
        ratios = [repeated(reference, engine_file, length, repeat) for repeat in range(args.repeats)]
        plan = reports[0].plan
        rows.append(
            {
                "set (test rows)": f"{name}, {first.metric} ({first.rows})",
                "engine": " ".join(ENGINES[engine]),
                "method": method,
                "multiply-accumulates": f"{share:.0%}",
                "heads, neurons": f"{plan.heads_kept}, {plan.neurons_kept}",
                "metric": f"{100 * first.compressed:.2f}",
                "difference (95%)": f"{differences[0]:+.2f} ({100 * first.low:+.2f} to {100 * first.high:+.2f})",
                "all seeds": ", ".join(f"{difference:+.2f}" for difference in differences),
                **speed_columns(ratios),
                "minutes": f"{sum(reports[0].seconds.values()) / 60:.1f}",
            }
        )
        print(table(rows[-1:]), flush=True)
    print(f"\n{name}\n{table(rows)}", flush=True)


def speed_columns(ratios: list[list[float]]) -> dict[str, str]:
    """Medians and ranges of the speeds at batch 1 and 8; empty without repetitions."""
    if not ratios:
        return {}
    columns = list(zip(*ratios, strict=True))
    texts = [f"{np.median(column):.2f} ({min(column):.2f} to {max(column):.2f})" for column in columns]
    return {"batch 1": texts[0], "batch 8": texts[1]}


def print_latencies(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print drawn budgets of time, and the speed of the engine that was delivered, measured afresh."""
    model, rng, rows = starting_model(name, folder), np.random.default_rng(0), []
    for number in range(args.latencies):
        engine = args.engines[number % len(args.engines)]
        size = LATENCY_SIZES[(number // len(args.engines)) % len(LATENCY_SIZES)]
        speedup = float(np.exp(rng.uniform(np.log(1.3), np.log(4.0))))
        report = report_of(Cell(engine, "reconstruct", 0, {"speedup": speedup}, size), name, model, folder)
        budget = report.budget[0]
        rows.append(
            {
                "engine": " ".join(ENGINES[engine]),
                "batch x tokens": f"{size[0]} x {size[1]}",
                "speed requested": f"{speedup:.2f}",
                "predicted over budget": f"{budget.predicted / budget.requested:.3f}",
                "delivered over budget": f"{budget.reached / budget.requested:.3f}",
                "metric": f"{100 * report.scores[0].compressed:.1f}",
            }
        )
        print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}", flush=True)


def main() -> None:
    """Print the tables of the sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument(
        "--shares", type=float, nargs="+", help="shares of multiply-accumulates, in place of the size's"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["reconstruct"])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--latencies", type=int, default=0, help="number of drawn latencies, in place of the table")
    parser.add_argument("--repeats", type=int, default=3, help="processes that time each engine; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}; size {args.size}", flush=True)
    for name in args.sets:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        (print_latencies if args.latencies else print_losses)(name, folder, args)


if __name__ == "__main__":
    main()
