"""MiniLM on SST-2 and on a sample of MNLI: every method at 60, 36, 24, 12, 6 and 3 of 72 heads, against dense.

`compress study grid` on these data. Every run starts from the same weights and learns for the same steps at the same
learning rates; the dense one keeps every head, pipelined methods and searches start from it. Checkpoints are chosen on
dev, accuracy is reported on test, with a paired bootstrap over the test rows. SST-2's start is `minilm-sst2`; MNLI's is
its encoder with a fresh head of three classes, learnt here for two epochs on the training rows.

    python -m benchmarks.grid sst2 mnli --size small                                     # the methods side by side
    python -m benchmarks.grid sst2 --size paper --fp32 --methods dsp --keeps 36 12 6     # one method at its best
    python -m benchmarks.grid sst2 --size tiny                                           # minutes

A cell (method, heads kept, seed) that `--out` already holds is not run again, one that was interrupted resumes, and
several processes started with the same `--out` share the cells among them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.machine import machine
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.study import StudyRequest
from compressor.measure import paired_interval
from compressor.model_folder import example_inputs, load
from compressor.selection.learn import learn
from compressor.studies import StudySize, study
from compressor.tasks import open_data
from compressor.units import find_sites

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODEL = SHARED / "models" / "minilm-sst2"
METHODS = ("dsp", "ste", "hard-concrete", "dsp-pipelined", "taylor")
KEEPS = ("60", "36", "24", "12", "6", "3")
CLASSES = {"sst2": None, "mnli": ("contradiction", "entailment", "neutral")}


def _size(
    name: str, rows: int | None, steps: int, keeps: tuple[str, ...], seeds: tuple[int, ...], evaluations: int = 2
) -> StudySize:
    """As many optimizer steps a cell, whatever that is in epochs; at most `rows` to report on."""
    return StudySize(name, None, 1000, rows, 1.0, steps, seeds, keeps, evaluations, 250, 100, 10, 3.0)


SIZES = {
    "tiny": _size("tiny", 200, 10, ("36",), (1,)),
    "small": _size("small", 2000, 120, KEEPS, (1, 2, 3)),
    "paper": _size("paper", None, 800, KEEPS, (1, 2, 3), evaluations=4),
}
COOLDOWN = 0.4
"""In a run this short the choice settles early: the rest of it goes to learning with the heads that stay."""


def start(data: str, folder: Path) -> Path:
    """The model folder that every run on `data` starts from."""
    classes = CLASSES[data]
    if classes is None:
        return MODEL
    if not folder.exists():
        tune(fresh_head(folder.with_name(f"{folder.name}-begun"), classes), data, folder, epochs=2)
    return folder


def tune(
    begun: Path,
    data: str,
    folder: Path,
    epochs: float,
    max_length: int = 64,
    *,
    most: int | None = None,
    metric: str | None = None,
) -> None:
    """Learn on the training rows of `data` from the model folder `begun`, with every head, into `folder`: for so many
    epochs, at most so many steps. The folder appears whole; of several processes one makes it, the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _tune(begun, data, folder, epochs, max_length, most, metric)


def _tune(
    begun: Path, data: str, folder: Path, epochs: float, max_length: int, most: int | None, metric: str | None
) -> None:
    recipe = Recipe(
        model=begun,
        data=_file(data),
        keep="100%",
        epochs=epochs,
        learning_rate=1e-4,
        max_length=max_length,
        metric=metric,
        options={"mixed_precision": "bf16", "evaluations": 4},
    )
    opened = load(begun)
    rows, sites = (
        open_data(recipe.rows, opened, recipe.selection.seed),
        find_sites(opened.model, example_inputs(opened, 2, 8)),
    )
    if most is not None and most < epochs * len(rows.train) / recipe.selection.batch_size:
        recipe = recipe.updated(steps=most)
    learn(opened.model, sites, rows, recipe.selection, folder.with_name(f"{folder.name}-checkpoints"))
    partial = folder.with_name(f"{folder.name}.partial")
    AutoTokenizer.from_pretrained(begun).save_pretrained(partial)
    opened.model.save_pretrained(partial)
    partial.rename(folder)


def fresh_head(folder: Path, classes: Sequence[str]) -> Path:
    """Write MiniLM's encoder with a head of its own for these classes, drawn with seed 0; of one name: a regression."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL)
    config.problem_type = "regression" if len(classes) == 1 else "single_label_classification"
    config.id2label, config.label2id = dict(enumerate(classes)), {name: number for number, name in enumerate(classes)}
    fresh = AutoModelForSequenceClassification.from_pretrained(
        MODEL, config=config, ignore_mismatched_sizes=True, dtype=torch.float32
    )
    if len(classes) == 2:  # the folder's own head would fit
        torch.nn.init.normal_(fresh.classifier.weight, std=0.02)
        torch.nn.init.zeros_(fresh.classifier.bias)
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def _file(data: str) -> str:
    return str(SHARED / "data" / f"{data}.tsv.xz")


def table(cells: list[dict[str, Any]]) -> str:
    """The study as Markdown: a row a method and number of heads, over all its seeds."""
    dense = {cell["asked"]["seed"]: cell for cell in cells if cell["asked"]["method"] == "dense"}
    lines = ["| method | heads | seeds | dev | test | test of each seed | test minus dense, points (95%) |"]
    lines.append("|---|---|---|---|---|---|---|")
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["asked"]["method"], cell["heads"]), []).append(cell)
    for (method, heads), same in groups.items():
        bases = [dense[cell["asked"]["seed"]] for cell in same]
        difference = "" if method == "dense" else _difference(same, bases)
        dev, test = (100 * float(np.mean([cell[split] for cell in same])) for split in ("eval", "test"))
        each = ", ".join(f"{100 * cell['test']:.1f}" for cell in same)
        lines.append(f"| {method} | {heads} | {len(same)} | {dev:.2f} | {test:.2f} | {each} | {difference} |")
    return "\n".join(lines)


def _difference(cells: list[dict[str, Any]], bases: list[dict[str, Any]]) -> str:
    """Points of test accuracy over all seeds; each draw of the bootstrap takes the same rows of every run."""
    dense, pruned = (np.mean([_right(cell) for cell in side], axis=0) for side in (bases, cells))
    found = paired_interval(dense, pruned, lambda right: 100 * float(right.mean()), seed=0, resamples=10_000)
    return f"{found.difference:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def _right(cell: dict[str, Any]) -> np.ndarray:
    predicted, true = np.array(cell["answers"]).T
    return predicted == true


def main() -> None:
    """Run the cells that are missing and print a table a data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", choices=CLASSES, default=["sst2"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--keeps", nargs="+", help="default: those of the size")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--rows", type=int, help="evaluate on at most so many dev and test rows")
    parser.add_argument("--fp32", action="store_true", help="learn in float32; else matrices are multiplied in bf16")
    parser.add_argument("--out", type=Path, default=Path("build/grid"), help="a study's folder for each data and size")
    args = parser.parse_args()
    if not MODEL.exists():
        print(f"skipped: {MODEL} is not on this machine")
        return
    size = SIZES[args.size]
    if args.rows:
        size = replace(size, eval=args.rows, test=args.rows)
    keeps, seeds = tuple(args.keeps or size.keeps), tuple(args.seeds or size.seeds)
    print(f"machine: {machine('torch', 'transformers')}; {torch.get_num_threads()} threads")
    for data in args.data:
        recipe = Recipe(
            model=start(data, args.out / f"{data}-start"),
            data=_file(data),
            keep="100%",
            options={"cooldown": COOLDOWN, "mixed_precision": "no" if args.fp32 else "bf16"},
            steps=size.steps,
            learning_rate=1e-4,
            max_length=64,
            out=args.out / f"{data}-{size.name}",
        )
        axes = {"methods": tuple(args.methods), "keeps": keeps, "seeds": seeds}
        study("grid", StudyRequest(recipe, size, axes=axes), Console())
        found = [json.loads(path.read_text()) for path in sorted(recipe.output.out.glob("cells/*.json"))]
        order = {name: place for place, name in enumerate(("dense", *args.methods))}
        found.sort(key=lambda cell: (order[cell["asked"]["method"]], -cell["heads"], cell["asked"]["seed"]))
        print(
            f"\n{data}, size {size.name}: {size.steps} steps of 32 rows, seeds {seeds}\n\n{table(found)}\n", flush=True
        )


if __name__ == "__main__":
    main()
