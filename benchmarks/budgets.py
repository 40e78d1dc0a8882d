"""Prune MiniLM under budgets on several tasks, and print what each plan loses and how fast its engines are.

    python -m benchmarks.budgets sst2                     # by reconstruct: half and a third of the multiply-accumulates
    python -m benchmarks.budgets sst2 cola stsb --methods reconstruct fisher magnitude --engines ort
    python -m benchmarks.budgets sst2 --speedups 6.5 8.5 --engines openvino   # by measured time at batch 1
    python -m benchmarks.budgets sst2 --size large        # three seeds, five budgets

Starting models are those of `benchmarks.quantization`. Each row of a table is one run of `compress`, a folder under
`--out`; finished runs are not repeated. Statistics, loss curves and cost tables are shared between runs. Engines are
timed in fresh processes, in turn with ONNX Runtime's own fused engine of the whole model in fp32. Metrics are
those of the engines on test rows, with paired 95% intervals.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.quantization import reference_engine, repeated, run, starting_model
from benchmarks.speed import median_and_range, table
from benchmarks.text_sets import SETS, rows_file
from compressor.config.run import Recipe
from compressor.results import Report
from compressor.targets import target

SIZES = {"small": ((0.5, 1 / 3), 1), "large": ((2 / 3, 0.5, 0.4, 1 / 3, 0.25), 3)}
"""Shares of multiply-accumulates, and number of seeds."""
ENGINES = {"ort": ("ort", "fp32"), "openvino": ("openvino", "int8")}
METHODS: dict[str, dict[str, Any]] = {
    "reconstruct": {"method": "reconstruct"},
    "fisher": {"method": "fisher"},
    "magnitude": {"method": "magnitude"},
    "dsp": {"method": "dsp", "keep": 36, "training_steps": 400, "learning_rate": 1e-4},
}
"""The fields of each method. `dsp` learns with labels which half of the heads stays; neurons fill the budget."""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        engine: key of `ENGINES`.
        method: key of `METHODS`.
        seed: seed of the rows that are drawn.
        budget: the options that set the budget.
        prune_rows: rows that units are chosen and refitted by; None: as many as by default.
    """

    engine: str
    method: str
    seed: int
    budget: dict[str, Any]
    prune_rows: int | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        budget = "-".join(f"{key}{value:.3g}" for key, value in self.budget.items() if key != "budget_at")
        rows = "" if self.prune_rows is None else f"-rows{self.prune_rows}"
        return f"{self.engine}-{self.method}-{budget}{rows}-seed{self.seed}"


def report_of(cell: Cell, name: str, model: Path, folder: Path, fields: Mapping[str, Any] | None = None) -> Report:
    """The report of a cell on a set, which runs if it has not; `fields` are further ones of its recipe."""
    fields = {"metric": SETS[name].metric, **(fields or {})}
    return pruned(cell, model, rows_file(name, folder), SETS[name].max_length, folder, fields)


def pruned(cell: Cell, model: Path, rows: Path, length: int, folder: Path, fields: Mapping[str, Any]) -> Report:
    """The report of a cell on rows of at most `length` tokens, which runs if it has not; `fields` are further ones."""
    runtime, precision = ENGINES[cell.engine]
    recipe: dict[str, Any] = {
        "model": model,
        "data": str(rows),
        "max_length": length,
        **METHODS[cell.method],
        "target": runtime,
        "precision": precision,
        "batch": (1, 8),
        "seq": (length,),
        "shapes": (f"1x{length}", f"8x{length}") if runtime == "openvino" else (),
        "seconds": 3.0,
        "seed": cell.seed,
        "statistics": folder / "statistics",
        "out": folder / "budgets" / cell.name,
        **cell.budget,
        **({} if cell.prune_rows is None else {"prune_rows": cell.prune_rows}),
        **fields,
    }
    return run(Recipe(**recipe))


def print_losses(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print the table of one set: plans by multiply-accumulates."""
    model = starting_model(name, folder)
    length = SETS[name].max_length
    reference = reference_engine(model, length, folder)
    shares, seeds = SIZES[args.size]
    budgets: list[dict[str, Any]] = [{"macs": share} for share in args.shares or shares]
    if args.speedups:
        budgets = [{"speedup": speedup, "budget_at": (f"1x{length}",)} for speedup in args.speedups]
    rows = []
    for engine, method, budget in itertools.product(args.engines, args.methods, budgets):
        cells = [Cell(engine, method, seed, budget, args.prune_rows) for seed in range(args.seeds or seeds)]
        reports = [report_of(cell, name, model, folder) for cell in cells]
        engine_file = folder / "budgets" / cells[0].name / target(ENGINES[engine][0]).engine_file
        ratios = [repeated(reference, engine_file, length, repeat) for repeat in range(args.repeats)]
        rows.append(
            {
                **plan_columns(name, cells[0], reports),
                **speed_columns(ratios),
                "minutes": f"{sum(reports[0].seconds.values()) / 60:.1f}",
            }
        )
        print(table(rows[-1:]), flush=True)
    print(f"\n{name}\n{table(rows)}", flush=True)


def plan_columns(name: str, cell: Cell, reports: Sequence[Report]) -> dict[str, str]:
    """The plan of a cell and its metric against dense; `reports` are those of its seeds, the first of which counts."""
    first, plan, budget = reports[0].scores[0], reports[0].plan, cell.budget
    differences = [100 * (report.scores[0].compressed - report.scores[0].dense) for report in reports]
    return {
        "set (test rows)": f"{name}, {first.metric} ({first.rows})",
        "engine": " ".join(ENGINES[cell.engine]),
        "method": cell.method,
        "budget": f"{budget['macs']:.0%} of MACs" if "macs" in budget else f"speedup {budget['speedup']:g}",
        "heads, neurons": f"{plan.heads_kept}, {plan.neurons_kept}",
        "metric": f"{100 * first.compressed:.2f}",
        "difference (95%)": f"{differences[0]:+.2f} ({100 * first.low:+.2f} to {100 * first.high:+.2f})",
        "all seeds": ", ".join(f"{difference:+.2f}" for difference in differences),
    }


def speed_columns(ratios: list[list[float]]) -> dict[str, str]:
    """Medians and ranges of the speeds at batch 1 and 8; empty without repetitions."""
    if not ratios:
        return {}
    columns = list(zip(*ratios, strict=True))
    texts = [median_and_range(column) for column in columns]
    return {"batch 1": texts[0], "batch 8": texts[1]}


def main() -> None:
    """Print the tables of the sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument(
        "--shares", type=float, nargs="+", help="shares of multiply-accumulates, in place of the size's"
    )
    parser.add_argument("--speedups", type=float, nargs="+", help="speed against dense at batch 1, in place of shares")
    parser.add_argument("--seeds", type=int, help="number of seeds, in place of the size's")
    parser.add_argument("--prune-rows", type=int, help="rows that units are chosen and refitted by")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["reconstruct"])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=3, help="processes that time each engine; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}; size {args.size}", flush=True)
    for name in args.sets:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        print_losses(name, folder, args)


if __name__ == "__main__":
    main()
