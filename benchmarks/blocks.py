"""Attention pruning on GLUE sets: drop 20 to 80 percent of the blocks of MiniLM's attention maps.

MiniLM's encoder is trained on each set with a new head, for at most three epochs. From these weights `dense` is trained
for the steps of the size; runs with masks are trained for as many steps, with masks derived from the dense run's maps
or drawn at random (`python -m benchmarks.studies blocks --from-original-weights`).

    python -m benchmarks.blocks --size tiny
    python -m benchmarks.blocks rte cola mrpc stsb sst2 mnli --size small
    python -m benchmarks.blocks rte cola mrpc sst2 --cross 0.4      # figure 6: masks of each set on all others

The other tables of attention pruning are studies of model folders that other scripts write:

    python -m benchmarks.studies blocks build/question_answering/small/model --data squad.jsonl.xz --max-length 384 \
        --block-size 16 --shares 0.5,0.8,0.9
    python -m benchmarks.studies blocks build/translation/small/model --task translation --data multi30k_deen.tsv.xz \
        --block-size 1 --kinds all,bidirectional,causal,cross --masks own --shares 0.4,0.6,0.8
    compress train build/lm --data wikitext2_train.txt.xz ... \
        && python -m benchmarks.studies blocks build/lm --shares 0.8 ...

Finished cells in `--out` are not run again, and several processes may share the cells.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.grid import MODEL, data_file, tune, write_new_head
from benchmarks.machine import machine
from benchmarks.studies import figures
from benchmarks.studies.findings import Findings
from benchmarks.studies.request import StudyRequest, StudySize
from benchmarks.studies.run import study
from compressor.cli.console import Console
from compressor.config.run import Recipe


@dataclass(frozen=True)
class Set:
    """Classes and metric of a data set."""

    classes: tuple[str, ...]
    metric: str


SETS = {
    "rte": Set(("entailment", "not_entailment"), "accuracy"),
    "cola": Set(("0", "1"), "matthews"),
    "mrpc": Set(("0", "1"), "f1"),
    "stsb": Set(("score",), "spearman"),
    "sst2": Set(("negative", "positive"), "accuracy"),
    "mnli": Set(("contradiction", "entailment", "neutral"), "accuracy"),
}
EPOCHS = 3.0
"""Epochs of training on a set before masks are applied."""
STEPS = {"tiny": 4, "small": 600, "paper": None}
"""Maximum number of steps of that training."""
SIZES = {
    "tiny": StudySize("tiny", 128, 64, 64, 1.0, 4, (1,), (), 1, 32, 5, 2, 0.1),
    "small": StudySize("small", 10_000, 600, 1500, 2.0, 150, (1, 2), (), 2, 500, 20, 10, 3.0),
    "paper": StudySize("paper", None, None, None, 3.0, None, (1, 2, 3, 4, 5), (), 6, 10_000, 100, 10, 10.0),
}


def tuned_model(name: str, out: Path, size: str) -> Path:
    """The model folder from which the runs on a set start; it is trained if it does not exist."""
    folder = out / f"{name}-{size}-start"
    if not folder.exists():
        model = write_new_head(out / f"{name}-begun", SETS[name].classes)
        tune(model, name, folder, EPOCHS, max_steps=STEPS[size], metric=SETS[name].metric)
    return folder


def main() -> None:
    """Run the cells that are missing and print a table for each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", choices=SETS, default=["rte"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.4, 0.5, 0.6, 0.8])
    parser.add_argument("--masks", nargs="+", default=["own", "random"])
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--block-size", type=int, default=1, help="1: single entries, as in the paper's tables")
    parser.add_argument("--cross", type=float, metavar="P", help="masks of each set on all others, at this share")
    parser.add_argument("--out", type=Path, default=Path("build/blocks"), help="a study's folder for each set and size")
    args = parser.parse_args()
    if not MODEL.exists():
        print(f"skipped: {MODEL} is not on this machine")
        return
    size = SIZES[args.size] if args.seeds is None else replace(SIZES[args.size], seeds=tuple(args.seeds))
    print(f"machine: {machine('torch', 'transformers')}; {torch.get_num_threads()} threads")
    crossed = np.full((len(args.sets), len(args.sets)), np.nan)
    for column, name in enumerate(args.sets):
        findings = study("blocks", _request(name, size, args), Console())
        if args.cross:
            crossed[:, column] = [_lost_percent(findings, name, source, args.cross) for source in args.sets]
        for table in findings.tables:
            print(f"\n{name}, {size}, seeds {size.seeds}: {table.title}\n")
            print(f"| {' | '.join(table.columns)} |\n|{'---|' * len(table.columns)}")
            print("\n".join(f"| {' | '.join(row)} |" for row in table.rows), flush=True)
    if args.cross:
        title = f"metric minus dense, % of it, p = {args.cross:g}: rows give the masks, columns are scored"
        print(f"\n{title}\n\n| | {' | '.join(args.sets)} |\n|{'---|' * (len(args.sets) + 1)}")
        for name, line in zip(args.sets, crossed, strict=True):
            print(f"| {name} | {' | '.join(f'{value:+.1f}' for value in line)} |")
        figure = figures.table_map(crossed, args.sets, f"rows: masks of {', '.join(args.sets)}", first=1)
        figure.savefig(args.out / f"crossed-{size.name}.svg")


def _request(name: str, size: StudySize, args: argparse.Namespace) -> StudyRequest:
    """The request for the study of one set; with `--cross`, masks of the other sets are included."""
    recipe = Recipe(
        model=tuned_model(name, args.out, size.name),
        data=data_file(name),
        metric=SETS[name].metric,
        keep="100%",
        options={"mixed_precision": "bf16"},
        learning_rate=1e-4,
        max_length=64,
        block_size=args.block_size,
        from_original_weights=True,
        out=args.out / f"{name}-{size.name}{'-crossed' if args.cross else ''}",
    )
    if args.cross:
        sources = [data_file(source) for source in args.sets if source != name]
        return StudyRequest(recipe, size, (data_file(name), *sources), {"shares": (args.cross,), "masks": ("own",)})
    return StudyRequest(recipe, size, (data_file(name),), {"shares": tuple(args.shares), "masks": tuple(args.masks)})


def _lost_percent(findings: Findings, name: str, source: str, share: float) -> float:
    """Mean change of the metric on a set with masks of another, in percent of the dense metric; NaN: not measured.

    Args:
        findings: those of the set, also of other shares.
        name: the set.
        source: the set of the masks.
        share: share of the blocks that they drop.
    """
    masks = "own" if source == name else Path(data_file(source)).name
    changes = [
        100 * row["difference"] / (row["test"] - row["difference"])
        for row in findings.rows
        if row["masks"] == masks and row["share"] == share
    ]
    return float(np.mean(changes)) if changes else float("nan")


if __name__ == "__main__":
    main()
