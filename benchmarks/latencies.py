"""Draw latencies between the least possible and the whole model's, and print whether the plans for them meet them.

    python -m benchmarks.latencies sst2              # 20 latencies: ONNX Runtime in fp32 and OpenVINO in int8
    python -m benchmarks.latencies sst2 --threads 1  # one thread, which is disturbed less on a shared machine
    python -m benchmarks.latencies sst2 --number 4 --engines ort

The model is that of `benchmarks.quantization`. Losses and the cost table of an engine are measured once, for all of
its sizes. For each latency, units are allocated in rounds as in a run of `compress`; the engine of the plan is then
built afresh and timed in turn with two engines of the whole model: the dense one, ONNX Runtime's fused fp32, and that
of the plan's runtime and precision. Its ratio to each of them is compared with that of the latency. On a machine that
is disturbed, the latter repeats better. The weights of plans are not refitted, which does not change times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.quantization import starting_model
from benchmarks.speed import table
from benchmarks.text_sets import SETS, rows_file
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.config.steps import Units
from compressor.engines.build import build_variant, shrink_graph
from compressor.engines.choices import choices
from compressor.engines.export import export_graph
from compressor.measure import paired_times
from compressor.measure.costs import CostTable
from compressor.model_folder import example_feeds_by_size
from compressor.progress import RunLog
from compressor.pruning.allocate import MAX_BUDGET_RATIO, MIN_BUDGET_RATIO, Constraint, allocate_until_met, macs_of
from compressor.pruning.costs import PlanEngines, keep_counts
from compressor.pruning.measure import CostSource
from compressor.run.load import load_model, read_rows
from compressor.run.run_context import RunInputs
from compressor.run.sizes import work_out_sizes
from compressor.run.steps.units import pruner_of
from compressor.selection.allocation import Curve
from compressor.tasks.calibration import calibration_rows
from compressor.units import keep_all
from compressor.workdir import open_workdir
from graph_passes.files import write_text

ENGINES = {"ort": ("ort", "fp32"), "openvino": ("openvino", "int8")}
SIZES = ((1, 64), (1, 128), (1, 384), (8, 64), (8, 128))
"""Batch sizes and lengths, of which each latency has the next."""
SECONDS = 45.0
"""Time spent on the three engines of a plan that is delivered."""
MARGIN = 0.1
"""Distance of the drawn latencies from the least possible and from the whole model's, as a share of the logarithm."""


@dataclass(frozen=True)
class Timing:
    """What plans of one engine are allocated and timed with.

    Attributes:
        costs: the source of cost tables.
        tables: times at each size.
        macs: multiply-accumulates at the first size.
        losses: name of the group -> loss at every number of units.
    """

    costs: CostSource
    tables: Sequence[CostTable]
    macs: CostTable
    losses: dict[str, Curve]


def prepare(
    engine: str,
    name: str,
    folder: Path,
    scratch: Path,
    log: RunLog,
    timed: Sequence[tuple[int, int]] = SIZES,
    threads: int | None = None,
) -> Timing:
    """Export the model, build the dense engine, and measure losses and the cost table of each size."""
    runtime, precision = ENGINES[engine]
    shapes = tuple(f"{batch}x{seq}" for batch, seq in timed) if runtime == "openvino" else ()
    fields: dict[str, Any] = {
        "model": starting_model(name, folder),
        "data": str(rows_file(name, folder)),
        "max_length": SETS[name].max_length,
        "target": runtime,
        "precision": precision,
        "batch": sorted({batch for batch, _ in timed}),
        "seq": sorted({seq for _, seq in timed}),
        "shapes": shapes,
        "speedup": 2,
        "threads": threads,
        "statistics": folder / "statistics",
        "out": scratch / "out",
    }
    recipe = Recipe(**fields)
    (step,) = steps = steps_of(recipe)
    assert isinstance(step, Units)
    model = load_model(recipe, steps)
    data = read_rows(recipe, steps, model)
    sizes = work_out_sizes(RunInputs(recipe, steps, model, data, None))
    with log.stage("exporting the model"):
        plan = keep_all(model.groups)
        reference = export_graph("dense", model.folder, plan, recipe.export, sizes.cases, scratch / "reference.onnx")
        graph = shrink_graph(reference, sizes.cases, scratch / "model.onnx")
        dense = build_variant(graph, recipe.engine.reference, sizes.build, sizes.cases).engine
    engines = PlanEngines(
        reference=reference,
        choice=choices(recipe.engine)[0],
        options=sizes.build,
        row=calibration_rows(data, 1, recipe.selection.seed)[0],
        drop_unread=True,
        scratch=scratch / "plans",
    )
    inputs = example_feeds_by_size(model.folder, timed)
    structure = model.folder.access.structure_with(model.groups)
    costs = CostSource(structure, model.groups, engines, dense, inputs, log)
    pruner = pruner_of(step, model, data, model.groups, folder / "statistics")
    with log.stage("gathering statistics of the rows") as on_progress:
        pruner.rank(on_progress)
    with log.stage("measuring what each group contributes") as on_progress:
        losses = dict(pruner.losses(on_progress))
    counted = macs_of(costs.count_tables())
    return Timing(costs, costs.time_tables(counted), counted, losses)


def request(timing: Timing, number: int, rng: np.random.Generator) -> dict[str, Any]:
    """Allocate units for one drawn latency, build and time the plan afresh, and return the numbers of a row."""
    cost_table = timing.tables[number % len(SIZES)]
    share = rng.uniform(MARGIN, 1 - MARGIN)
    budget = float(np.exp((1 - share) * np.log(cost_table.least) + share * np.log(cost_table.whole)))
    rounds: list[tuple[float, float]] = []

    def measure(counts: Mapping[str, int]) -> list[float]:
        rounds.append((cost_table.cost(counts), timing.costs.time_plan(counts, [cost_table])[0]))
        return [rounds[-1][1]]

    allocation = allocate_until_met(timing.costs.groups, timing.losses, [Constraint(cost_table, budget)], measure)
    predicted, milliseconds = rounds[0]
    to_dense, to_whole = deliver(timing.costs, allocation.counts, cost_table)
    return {
        "batch": cost_table.batch,
        "tokens": cost_table.seq,
        "budget": budget,
        "dense": cost_table.dense,
        "first": predicted / milliseconds,
        "rounds": len(rounds),
        "in its round": allocation.measured[0] / budget,
        "used": to_dense / budget,
        "used by whole": to_whole / budget,
    }


def deliver(costs: CostSource, counts: Mapping[str, int], cost_table: CostTable) -> tuple[float, float]:
    """Milliseconds of the engine of a plan, built afresh, by its ratio to the dense engine and to the whole model's.

    All three are timed in turn; the table has the times that both ratios are multiplied by.
    """
    engine = costs.engines.build(keep_counts(costs.engines.plan, costs.groups, counts))
    timed = [costs.engines.whole, costs.dense, engine]
    whole, dense, seconds = paired_times(timed, costs.inputs[cost_table.size], SECONDS)
    costs.engines.discard(engine)
    return cost_table.dense * seconds / dense, cost_table.whole * seconds / whole


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print every latency, and how many were met."""
    lines = [
        {
            "engine": " ".join(ENGINES[row["engine"]]),
            "batch x tokens": f"{row['batch']} x {row['tokens']}",
            "latency, ms": f"{row['budget']:.2f}",
            "of dense": f"{row['budget'] / row['dense']:.2f}",
            "first prediction over measured": f"{row['first']:.3f}",
            "rounds": row["rounds"],
            "in its round over latency": f"{row['in its round']:.3f}",
            "delivered over latency, by dense": f"{row['used']:.3f}",
            "by the whole model": f"{row['used by whole']:.3f}",
        }
        for row in rows
    ]
    print(table(lines))
    for name, key in (("dense", "used"), ("the whole model", "used by whole")):
        used = [row[key] for row in rows]
        met = sum(share <= MAX_BUDGET_RATIO for share in used)
        filled = sum(MIN_BUDGET_RATIO <= share <= MAX_BUDGET_RATIO for share in used)
        print(
            f"\nby {name}: {met} of {len(rows)} met (within {MAX_BUDGET_RATIO}), of which {filled} use at least"
            f" {MIN_BUDGET_RATIO:.0%}"
        )
    error = float(np.median([abs(row["first"] - 1) for row in rows]))
    print(f"median error of the first prediction {error:.1%}", flush=True)


def main() -> None:
    """Draw the latencies of each engine; finished ones are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(SETS))
    parser.add_argument("--number", type=int, default=10, help="latencies for each engine")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument(
        "--threads", type=int, help="threads of the engines; default: as many as cores, whose disturbances add up"
    )
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}; seed 0", flush=True)
    folder = args.out / args.name
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for engine in args.engines:
        stem = f"latencies-{engine}" if args.threads is None else f"latencies-{engine}-threads{args.threads}"
        file = folder / f"{stem}.json"
        stored: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
        if len(stored) < args.number:
            with open_workdir(folder / stem, force=True) as work:
                timing = prepare(engine, args.name, folder, work.scratch, RunLog(Console()), threads=args.threads)
                for number in range(len(stored), args.number):
                    numbers = request(timing, number, np.random.default_rng(number))
                    stored.append({"engine": engine, **numbers})
                    write_text(file, json.dumps(stored))
                    print(json.dumps(stored[-1]), flush=True)
        rows += stored[: args.number]
    print_rows(rows)


if __name__ == "__main__":
    main()
