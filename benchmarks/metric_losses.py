"""Compare how much of the metric plans of different sizes lose with the divergence of their outputs.

    python -m benchmarks.metric_losses sst2
    python -m benchmarks.metric_losses mnli --shares 0.5 0.3

The model is that of `benchmarks.quantization`. Units are allocated within shares of the weights of all units, by
`reconstruct`, and nothing is trained. For each plan and each split the table has the divergence (mean KL at temperature
1), the loss of the metric with its standard error, and the loss that the bisection of `--max-drop` expects from all
plans together, with its standard error. Errors are those of the same bootstrap draws of the rows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.quantization import starting_model
from benchmarks.speed import table
from benchmarks.text_sets import SETS, rows_file
from compressor import PruningInputs, ReconstructPruner, allocate
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.run.engine_choice.calibrate import calibration_batches, draw_rows
from compressor.run.load import load_model, read_rows
from compressor.run.pruning.metric_trials import ResampledScore, TrialScorer, estimate_losses
from compressor.run.run_log import RunLog

SHARES = (0.7, 0.5, 0.4, 1 / 3, 0.25, 1 / 6, 0.1)
ROWS, LOSS_ROWS = 2048, 682
LINEARS = {"heads": 4, "neurons": 2}
"""Linears that have weights of a unit: queries, keys, values and the output of heads; two of a feed-forward."""


def scores_of(name: str, folder: Path, shares: Sequence[float]) -> tuple[dict[str, list[ResampledScore]], bool]:
    """The scores of the whole model and of the plan of each share by split, and whether a higher metric is better."""
    log = RunLog(Console())
    with tempfile.TemporaryDirectory() as scratch:
        fields = {"max_length": SETS[name].max_length, "metric": SETS[name].metric, "macs": 0.5}
        source = {"model": starting_model(name, folder), "data": str(rows_file(name, folder)), "out": scratch}
        recipe = Recipe.model_validate({**source, **fields})
        model = load_model(recipe)
        data = read_rows(recipe, model)
    rows = draw_rows(data, ROWS + LOSS_ROWS, 0)
    pruner = ReconstructPruner(
        PruningInputs(
            model=model.folder.model,
            groups=model.groups,
            statistics=calibration_batches(data, rows[:ROWS]),
            held_out=calibration_batches(data, rows[ROWS:]),
            outputs=data.task.loss_outputs,
            seed=0,
            store=folder / "statistics" / "metric-losses",
        )
    )
    with log.stage("gathering statistics of the rows") as on_progress:
        pruner.rank(on_progress)
    with log.stage("measuring what each group contributes") as on_progress:
        losses = pruner.losses(on_progress)
    network = model.folder.model
    scorers = {
        split: TrialScorer(network, data.task, examples, 0, log)
        for split, examples in (("eval", data.eval), ("test", data.test))
    }
    scores = {split: [scorer.whole()] for split, scorer in scorers.items()}
    curves = [losses[group.name] for group in model.groups]
    weights = [LINEARS[group.type] * group.width for group in model.groups]
    total = sum(weight * group.units for weight, group in zip(weights, model.groups, strict=True))
    costs = [{count: weight * count for count in curve} for weight, curve in zip(weights, curves, strict=True)]
    for share in shares:
        counts = dict(zip(losses, allocate(curves, [costs], [share * total]), strict=True))
        network.load_state_dict(scorers["eval"].whole_weights)
        with log.stage(f"refitting the remaining weights, {share:.0%}") as on_progress:
            pruner.finish(counts, on_progress)
        for split, scorer in scorers.items():
            scores[split].append(scorer.score(f"{share:.0%}, {split}"))
    return scores, data.task.higher_is_better


def row_of(
    share: float, number: int, scores: dict[str, list[ResampledScore]], *, higher_is_better: bool
) -> dict[str, str]:
    """The row of the table of one plan."""
    row = {"weights of units": f"{share:.0%}"}
    for split, (whole, *plans) in scores.items():
        alone = estimate_losses(whole, plans[number : number + 1], higher_is_better=higher_is_better)[0]
        together = estimate_losses(whole, plans, higher_is_better=higher_is_better)[number]
        row[f"{split}: divergence"] = f"{plans[number].divergence:.3f}"
        row[f"{split}: loss"] = f"{100 * alone.loss:.2f} ± {100 * alone.error:.2f}"
        row[f"{split}: expected from all"] = f"{100 * together.loss:.2f} ± {100 * together.error:.2f}"
    return row


def main() -> None:
    """Print the tables of the sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of the weights of all units")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('torch')}; {ROWS} rows, one seed", flush=True)
    for name in args.sets:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        scores, higher_is_better = scores_of(name, folder, args.shares)
        rows = [
            row_of(share, number, scores, higher_is_better=higher_is_better) for number, share in enumerate(args.shares)
        ]
        print(f"\n{name}\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
