"""Distil MiniLM along ladders of budgets on several tasks, and print what each rung loses and how fast its engine is.

    python -m benchmarks.frontiers sst2                                # int8 on OpenVINO, by multiply-accumulates
    python -m benchmarks.frontiers sst2 stsb --engines ort openvino    # in fp32 on ONNX Runtime too
    python -m benchmarks.frontiers sst2 --budget speedup --values 6 8  # by time
    python -m benchmarks.frontiers sst2 --size large                   # three seeds, six rungs

Starting models are those of `benchmarks.quantization`. Each rung is a run of `compress`, a folder under `--out`, which
starts from the rung before; finished rungs are not repeated. Engines are timed in fresh processes, in turn with ONNX
Runtime's own fused engine of the whole model in fp32. Metrics are those of the engines on test rows, with paired 95%
intervals; evaluation rows select the checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.budgets import ENGINES, speed_columns
from benchmarks.machine import machine
from benchmarks.quantization import reference_engine, repeated, starting_model
from benchmarks.speed import table
from benchmarks.text_sets import SETS, rows_file
from compressor.cli.console import Console
from compressor.config.ladder import recipes_of
from compressor.report import load as load_report
from compressor.run.ladder import compress_ladder
from compressor.targets import target

SIZES = {"small": (("50%", "33%", "25%", "17%"), 1), "large": (("67%", "50%", "33%", "25%", "17%", "12%"), 3)}
"""Shares of multiply-accumulates, and number of seeds."""


def run_ladder(name: str, engine: str, seed: int, folder: Path, args: argparse.Namespace) -> tuple[Path, list[str]]:
    """The folder of a ladder, whose unfinished rungs are run, and the names of its rungs."""
    length, values = SETS[name].max_length, args.values or SIZES[args.size][0]
    runtime, precision = ENGINES[engine]
    steps = f"{args.steps}" if args.batch_size == 32 else f"{args.steps}x{args.batch_size}"
    out = folder / "frontiers" / f"{engine}-{args.budget}-{steps}-seed{seed}"
    flags: dict[str, Any] = {
        "data": str(rows_file(name, folder)),
        "max_length": length,
        "metric": SETS[name].metric,
        "target": runtime,
        "precision": precision,
        "batch": (1, 8),
        "seq": (length,),
        "shapes": (f"1x{length}", f"8x{length}") if runtime == "openvino" else (),
        "seconds": 2.0,
        "seed": seed,
        args.budget: list(values),
        "distill": True,
        "distill_steps": args.steps,
        "batch_size": args.batch_size,
        "out": str(out),
    }
    fields = {field: value for field, value in flags.items() if value is not None}
    rungs = recipes_of(str(starting_model(name, folder)), None, fields)
    frontier = compress_ladder(rungs, out, Console())
    return out, [rung.name for rung in frontier.rungs]


def print_frontiers(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print the table of one set."""
    length = SETS[name].max_length
    reference = reference_engine(starting_model(name, folder), length, folder)
    rows = []
    for engine in args.engines:
        ladders = [run_ladder(name, engine, seed, folder, args) for seed in range(SIZES[args.size][1])]
        minutes = 0.0
        for rung in ladders[0][1]:
            reports = [load_report(out / rung) for out, reached in ladders if rung in reached]
            differences = [100 * (report.scores[0].compressed - report.scores[0].dense) for report in reports]
            first, plan = reports[0].scores[0], reports[0].plan
            minutes += sum(reports[0].seconds.values()) / 60
            engine_file = ladders[0][0] / rung / target(ENGINES[engine][0]).engine_file
            ratios = [repeated(reference, engine_file, length, repeat) for repeat in range(args.repeats)]
            rows.append(
                {
                    "set (test rows)": f"{name}, {first.metric} ({first.rows})",
                    "engine": " ".join(ENGINES[engine]),
                    "rung": rung,
                    "heads, neurons": f"{plan.heads_kept}, {plan.neurons_kept}",
                    "metric": f"{100 * first.compressed:.2f}",
                    "difference (95%)": f"{differences[0]:+.2f} ({100 * first.low:+.2f} to {100 * first.high:+.2f})",
                    "all seeds": ", ".join(f"{difference:+.2f}" for difference in differences),
                    **speed_columns(ratios),
                    "minutes": f"{minutes:.1f}",
                }
            )
    print(f"\n{name}\n{table(rows)}", flush=True)


def main() -> None:
    """Print the tables of the sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--budget", choices=["macs", "speedup"], default="macs", help="what the rungs bound")
    parser.add_argument("--values", nargs="+", help="bounds of the rungs, in place of the size's: 50%% 25%%")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the distillation of a rung")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a step")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=["openvino"])
    parser.add_argument("--repeats", type=int, default=3, help="processes that time each engine; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    if args.values is not None and len(args.values) < 2:
        parser.error("argument --values: a ladder has two rungs or more; give several values, such as 50% 25%")
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}; size {args.size}", flush=True)
    for name in args.sets:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        print_frontiers(name, folder, args)


if __name__ == "__main__":
    main()
