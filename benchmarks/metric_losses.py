"""Compare how much of the metric plans of different sizes lose with the divergence of their outputs.

    python -m benchmarks.metric_losses sst2
    python -m benchmarks.metric_losses mnli --shares 0.5 0.3
    python -m benchmarks.metric_losses sst2 --shares 0.4 --prune-rows 4096 --ridge 0.1
    python -m benchmarks.metric_losses sst2 --float32

The model is that of `benchmarks.quantization`. Units are allocated within shares of the weights of all units, by
`reconstruct`, and nothing is trained. For each plan and each split the table has the divergence (mean KL at temperature
1), the loss of the metric with its standard error, and the loss that the bisection of `--max-drop` expects from all
plans together, with its standard error. Errors are those of the same bootstrap draws of the rows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.quantization import starting_model
from benchmarks.speed import table
from benchmarks.text_sets import SETS, rows_file
from compressor import PruningInputs, ReconstructPruner, allocate
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.models.forwards import tensors_of
from compressor.progress import RunLog
from compressor.pruning.bisect import ResampledScore, estimate_losses, upper_losses
from compressor.run.load import load_model, read_rows
from compressor.run.run_context import LoadedModel
from compressor.run.scorer import Scorer
from compressor.selection.pruners.reconstruct.pruner import ReconstructOptions
from compressor.tasks import Data
from compressor.tasks.calibration import calibration_batches, draw_rows
from compressor.training import precision

SHARES = (0.7, 0.5, 0.4, 1 / 3, 0.25, 1 / 6, 0.1)
LOSS_ROWS = 682
LINEARS = {"heads": 4, "neurons": 2}
"""Linears that have weights of a unit: queries, keys, values and the output of heads; two of a feed-forward."""


@contextmanager
def prepared(
    name: str, folder: Path, prune_rows: int, options: ReconstructOptions, log: RunLog
) -> Iterator[tuple[LoadedModel, Data, ReconstructPruner]]:
    """The model of a set with its rows, and the method that prunes it, whose files are removed afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        fields: dict[str, Any] = {
            "model": starting_model(name, folder),
            "data": str(rows_file(name, folder)),
            "max_length": SETS[name].max_length,
            "metric": SETS[name].metric,
            "macs": 0.5,
            "out": Path(scratch) / "out",
        }
        recipe = Recipe(**fields)
        model = load_model(recipe, steps_of(recipe))
        data = read_rows(recipe, steps_of(recipe), model)
        rows = np.random.default_rng(0).permutation(draw_rows(data, prune_rows + LOSS_ROWS, 0)).tolist()
        inputs = PruningInputs(
            model=model.folder.model,
            groups=model.groups,
            statistics=list(map(tensors_of, calibration_batches(data, sorted(rows[LOSS_ROWS:])))),
            held_out=list(map(tensors_of, calibration_batches(data, sorted(rows[:LOSS_ROWS])))),
            outputs=data.task.loss_outputs,
            seed=0,
            store=Path(scratch),
        )
        pruner = ReconstructPruner(inputs, options)
        with log.stage("gathering statistics of the rows") as on_progress:
            pruner.rank(on_progress)
        yield model, data, pruner


def scores_of(
    model: LoadedModel, data: Data, pruner: ReconstructPruner, shares: Sequence[float], log: RunLog
) -> dict[str, list[ResampledScore]]:
    """The scores of the whole model and of the plan of each share, by split."""
    with log.stage("measuring what each group contributes") as on_progress:
        losses = pruner.losses(on_progress)
    access, groups = model.folder.access, model.groups
    splits = {"eval": data.eval, "test": data.test}
    scorers = {split: Scorer(access, data.task, examples, 0, log) for split, examples in splits.items()}
    scores = {split: [scorer.score_whole()] for split, scorer in scorers.items()}
    weights = [LINEARS[group.type] * group.width for group in groups]
    curves = [losses[group.name] for group in groups]
    costs = [{count: weight * count for count in curve} for weight, curve in zip(weights, curves, strict=True)]
    total = sum(weight * group.units for weight, group in zip(weights, groups, strict=True))
    for share in shares:
        counts = allocate(curves, [costs], [share * total])
        access.load_state(scorers["eval"].whole_state)
        with log.stage(f"refitting the remaining weights, {share:.0%}") as on_progress:
            pruner.finish({group.name: count for group, count in zip(groups, counts, strict=True)}, on_progress)
        for split, scorer in scorers.items():
            scores[split].append(scorer.score(f"{share:.0%}, {split}"))
    return scores


def row_of(
    share: float, number: int, scores: dict[str, list[ResampledScore]], *, higher_is_better: bool
) -> dict[str, str]:
    """The row of the table of one plan."""
    row = {"weights of units": f"{share:.0%}"}
    for split, (whole, *plans) in scores.items():
        alone = estimate_losses(whole, plans[number : number + 1], higher_is_better=higher_is_better)[0]
        together = estimate_losses(whole, plans, higher_is_better=higher_is_better)[number]
        most = upper_losses(whole, plans, higher_is_better=higher_is_better)[number]
        row[f"{split}: divergence"] = f"{plans[number].divergence:.4f}"
        row[f"{split}: loss"] = f"{100 * alone.loss:.2f} ± {100 * alone.error:.2f}"
        row[f"{split}: expected from all"] = f"{100 * together.loss:.2f} ± {100 * together.error:.2f}"
        row[f"{split}: at most"] = f"{100 * most:.2f}"
    return row


def main() -> None:
    """Print the tables of the sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of the weights of all units")
    parser.add_argument("--prune-rows", type=int, default=2048, help="rows that units are chosen and refitted by")
    parser.add_argument("--ridge", type=float, default=ReconstructOptions().ridge, help="option of `reconstruct`")
    parser.add_argument("--float32", action="store_true", help="no bfloat16, also where it is native")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    options = ReconstructOptions(ridge=args.ridge)
    if args.float32:
        precision.bfloat16_instructions = lambda: ()
    settings = f"{args.prune_rows} rows, ridge {args.ridge}, one seed, mixed precision: {precision.native_precision()}"
    print(f"machine: {machine('torch')}; {settings}", flush=True)
    for name in args.sets:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        log = RunLog(Console())
        with prepared(name, folder, args.prune_rows, options, log) as (model, data, pruner):
            scores = scores_of(model, data, pruner, args.shares, log)
        better = data.task.higher_is_better
        rows = [row_of(share, number, scores, higher_is_better=better) for number, share in enumerate(args.shares)]
        print(f"\n{name}\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
