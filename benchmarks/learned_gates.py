"""Prune MiniLM to shares of its multiply-accumulates by learned gates, against `reconstruct` with distillation.

    python -m benchmarks.learned_gates                                  # dsp and hard-concrete on SST-2, one seed
    python -m benchmarks.learned_gates --methods dsp dsp+distill ste --shares 0.5 0.25 --size large
    python -m benchmarks.learned_gates --steps 20 --shares 0.5          # whether it works

Every run has the same number of training steps, of the same rows a step: the gates and the model on labels (`dsp`), the
remaining units on the outputs of the whole model (`reconstruct+distill`), or half of the steps each (`dsp+distill`).
Starting models are those of `benchmarks.quantization`. Each row of the table is one run of `compress`, a folder under
`--out`; finished runs are not repeated, and interrupted ones resume. Metrics are those of the engines in fp32 on test
rows, with paired 95% intervals against the whole model and against `reconstruct+distill` at the same share and seed.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.quantization import run, starting_model
from benchmarks.speed import table
from benchmarks.text_sets import SETS, rows_file
from compressor.config.methods import METHODS
from compressor.config.run import Recipe
from compressor.config.sections import RowsConfig
from compressor.measure import paired_interval
from compressor.model_folder import load
from compressor.results import Report
from compressor.targets import target
from compressor.tasks import Data, open_data, statistics

SIZES = {"small": ((0.5, 0.33), 1), "large": ((0.67, 0.5, 0.33, 0.25), 3)}
"""Shares of multiply-accumulates, and number of seeds."""
REFERENCE = "reconstruct+distill"
GATES = tuple(name for name, method in METHODS.items() if method.kind == "gate")
CHOICES = (*GATES, *(f"{name}+distill" for name in GATES))


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        method: the method, with `+distill` where distillation follows.
        share: share of the multiply-accumulates.
        steps: training steps in all.
        seed: seed of every draw.
    """

    method: str
    share: float
    steps: int
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.method}-macs{self.share:.3g}-{self.steps}-seed{self.seed}"

    @property
    def training(self) -> dict[str, Any]:
        """The fields of a recipe that divide the steps."""
        name, _, distills = self.method.partition("+")
        learning = 0 if name not in GATES else self.steps // 2 if distills else self.steps
        fields: dict[str, Any] = {"method": name}
        if learning:
            fields["training_steps"] = learning
        if distills:
            fields |= {"distill": True, "distill_steps": self.steps - learning}
        return fields


def recipe_of(cell: Cell, name: str, folder: Path) -> Recipe:
    """The recipe of a cell on a data set, whose folder has the rows."""
    length = SETS[name].max_length
    return Recipe(
        model=starting_model(name, folder),
        data=str(rows_file(name, folder)),
        max_length=length,
        metric=SETS[name].metric,
        macs=cell.share,
        seed=cell.seed,
        batch=(1,),
        seq=(length,),
        seconds=2.0,
        out=folder / "learned-gates" / cell.name,
        **cell.training,
    )


def answers_of(recipe: Recipe, data: Data) -> np.ndarray:
    """Sufficient statistics of the metric on the test rows, `[rows, statistics]`, by the engine of a finished run."""
    runtime = target(recipe.engine.reference.target)
    engine = runtime.load(recipe.output.out / runtime.engine_file)

    return statistics(data.task, data.test, lambda batch: data.task.logits(engine.run(batch)))


def row_of(cell: Cell, report: Report, answers: np.ndarray, reference: np.ndarray, data: Data) -> dict[str, str]:
    """The row of a run: its plan, its metric, and the differences to the whole model and to the reference."""
    score, plan = report.scores[0], report.plan
    against = paired_interval(reference, answers, data.task.score, cell.seed)
    differences = [(score.compressed - score.dense, score.low, score.high), tuple(against)]
    dense, distilled = (f"{100 * mid:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})" for mid, low, high in differences)
    return {
        "multiply-accumulates": f"{cell.share:.0%}",
        "method": cell.method,
        "seed": str(cell.seed),
        "steps": str(cell.steps),
        "heads, neurons": f"{plan.heads_kept}, {plan.neurons_kept}",
        "reached over budget": f"{max(row.reached / row.requested for row in report.budget if row.requested):.4f}",
        "metric": f"{100 * score.compressed:.2f}",
        "against the whole model (95%)": dense,
        f"against {REFERENCE} (95%)": "" if cell.method == REFERENCE else distilled,
        "minutes": f"{sum(report.seconds.values()) / 60:.1f}",
    }


def print_comparison(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print the table of one set, each row as soon as it is there."""
    shares, seeds = SIZES[args.size]
    rows = []
    model = load(starting_model(name, folder))
    length, metric = SETS[name].max_length, SETS[name].metric
    data = open_data(RowsConfig(data=str(rows_file(name, folder)), max_length=length, metric=metric), model)
    for share, seed in itertools.product(args.shares or shares, range(seeds)):
        reference = None
        for method in (REFERENCE, *args.methods):
            cell = Cell(method, share, args.steps, seed)
            recipe = recipe_of(cell, name, folder)
            report = run(recipe)
            answers = answers_of(recipe, data)
            reference = answers if reference is None else reference
            rows.append(row_of(cell, report, answers, reference, data))
            print(table(rows[-1:]), flush=True)
    score = report.scores[0]
    print(f"\n{name}, {score.metric} on {score.rows} test rows\n{table(rows)}", flush=True)


def main() -> None:
    """Print the tables of the sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], default=[], help="default: sst2")
    parser.add_argument("--methods", nargs="+", choices=CHOICES, default=["dsp", "hard-concrete"])
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--shares", type=float, nargs="+", help="shares, in place of the size's")
    parser.add_argument("--steps", type=int, default=4000, help="training steps of every run")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime')}; size {args.size}, {args.steps} steps", flush=True)
    for name in args.sets or ["sst2"]:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        print_comparison(name, folder, args)


if __name__ == "__main__":
    main()
