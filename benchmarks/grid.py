"""MiniLM on SST-2 and on a sample of MNLI: every method at 60, 36, 24, 12, 6 and 3 of 72 heads, against dense.

This runs `python -m benchmarks.studies grid` on these data. Every run starts from the same weights and trains for the
same steps at the same learning rates; the dense run keeps every head, and pipelined methods and searches start from it.
Checkpoints are selected on dev, accuracy is reported on test, with a paired bootstrap over the test rows. SST-2 starts
from `minilm-sst2`, MNLI from its encoder with a new head of three classes, trained here for two epochs.

    python -m benchmarks.grid sst2 mnli --size small                                     # the methods side by side
    python -m benchmarks.grid sst2 --size paper --fp32 --methods dsp --keeps 36 12 6     # one method at its best
    python -m benchmarks.grid sst2 --size tiny                                           # minutes

Finished cells (method, heads kept, seed) in `--out` are not run again, an interrupted cell resumes, and several
processes with the same `--out` share the cells.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.machine import machine
from benchmarks.studies.cell_store import read_results
from benchmarks.studies.request import StudyRequest, StudySize
from benchmarks.studies.run import study
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.step_list import step_of_flags
from compressor.config.steps import Heads
from compressor.measure import paired_interval
from compressor.model_folder import example_inputs, load
from compressor.selection.learn import learn
from compressor.tasks import open_data
from compressor.units import find_sites
from compressor.workdir import file_lock

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODEL = SHARED / "models" / "minilm-sst2"
METHODS = ("dsp", "ste", "hard-concrete", "dsp-pipelined", "taylor")
KEEPS = ("60", "36", "24", "12", "6", "3")
CLASSES = {"sst2": None, "mnli": ("contradiction", "entailment", "neutral")}


def _size(
    name: str, rows: int | None, steps: int, keeps: tuple[str, ...], seeds: tuple[int, ...], evaluations: int = 2
) -> StudySize:
    """A size with the same number of optimizer steps for every cell, and at most `rows` test rows."""
    return StudySize(name, None, 1000, rows, 1.0, steps, seeds, keeps, evaluations, 250, 100, 10, 3.0)


SIZES = {
    "tiny": _size("tiny", 200, 10, ("36",), (1,)),
    "small": _size("small", 2000, 120, KEEPS, (1, 2, 3)),
    "paper": _size("paper", None, 800, KEEPS, (1, 2, 3), evaluations=4),
}
COOLDOWN = 0.4
"""Option of dsp: in such short runs the selection settles early, and the model trains on with the kept heads."""


def start(data: str, folder: Path) -> Path:
    """The model folder from which every run on `data` starts; it is trained if `folder` does not exist."""
    classes = CLASSES[data]
    if classes is None:
        return MODEL
    if not folder.exists():
        tune(write_new_head(folder.with_name(f"{folder.name}-begun"), classes), data, folder, epochs=2)
    return folder


def tune(
    model: Path,
    data: str,
    folder: Path,
    epochs: float,
    max_length: int = 64,
    *,
    max_steps: int | None = None,
    metric: str | None = None,
) -> None:
    """Train a model with every head and write its folder atomically; of several processes only one trains.

    Args:
        model: the model folder to start from.
        data: name of the data set.
        folder: the model folder to write.
        epochs: passes over the training rows.
        max_length: maximum length of a row in tokens.
        max_steps: maximum number of steps; None: no limit.
        metric: the metric that selects the checkpoint; None: the main metric of the task.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.with_name(f".{folder.name}.lock"), create=True):
        if folder.exists():
            return
        recipe = Recipe(
            model=model,
            data=data_file(data),
            keep="100%",
            epochs=epochs,
            learning_rate=1e-4,
            max_length=max_length,
            metric=metric,
            options={"mixed_precision": "bf16", "evaluations": 4},
        )
        loaded = load(model)
        rows = open_data(recipe.rows, loaded, recipe.selection.seed)
        if max_steps is not None and max_steps < epochs * len(rows.train) / recipe.selection.batch_size:
            recipe = recipe.updated(training_steps=max_steps)
        sites = find_sites(loaded.model, example_inputs(loaded, 2, 8))
        learn(loaded.model, sites, rows, step_of_flags(recipe, Heads), folder.with_name(f"{folder.name}-checkpoints"))
        partial = folder.with_name(f"{folder.name}.partial")
        AutoTokenizer.from_pretrained(model).save_pretrained(partial)
        loaded.model.save_pretrained(partial)
        partial.rename(folder)


def write_new_head(folder: Path, classes: Sequence[str]) -> Path:
    """Write MiniLM's encoder with a new head for these classes, drawn with seed 0; one class means regression."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL)
    config.problem_type = "regression" if len(classes) == 1 else "single_label_classification"
    config.id2label, config.label2id = dict(enumerate(classes)), {name: number for number, name in enumerate(classes)}
    model = AutoModelForSequenceClassification.from_pretrained(
        MODEL, config=config, ignore_mismatched_sizes=True, dtype=torch.float32
    )
    if len(classes) == 2:  # the folder's own head has this shape and would be loaded
        torch.nn.init.normal_(model.classifier.weight, std=0.02)
        torch.nn.init.zeros_(model.classifier.bias)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def data_file(name: str) -> str:
    """The file of a data set's rows."""
    return str(SHARED / "data" / f"{name}.tsv.xz")


def table(cells: list[dict[str, Any]]) -> str:
    """The study as Markdown: a row for each method and number of heads, over all its seeds."""
    dense = {cell["settings"]["seed"]: cell for cell in cells if cell["settings"]["method"] == "dense"}
    lines = ["| method | heads | seeds | dev | test | test of each seed | test minus dense, points (95%) |"]
    lines.append("|---|---|---|---|---|---|---|")
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["settings"]["method"], cell["heads"]), []).append(cell)
    for (method, heads), group in groups.items():
        bases = [dense[cell["settings"]["seed"]] for cell in group]
        difference = "" if method == "dense" else _difference(group, bases)
        dev, test = (100 * float(np.mean([cell[split] for cell in group])) for split in ("eval", "test"))
        each = ", ".join(f"{100 * cell['test']:.1f}" for cell in group)
        lines.append(f"| {method} | {heads} | {len(group)} | {dev:.2f} | {test:.2f} | {each} | {difference} |")
    return "\n".join(lines)


def _difference(cells: list[dict[str, Any]], bases: list[dict[str, Any]]) -> str:
    """Difference of test accuracy in points, with its interval; a resample has the same rows of all runs."""
    dense, pruned = (np.mean([_is_correct(cell) for cell in side], axis=0) for side in (bases, cells))
    interval = paired_interval(dense, pruned, lambda correct: 100 * float(correct.mean()), seed=0, resamples=10_000)
    return f"{interval.difference:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"


def _is_correct(cell: dict[str, Any]) -> np.ndarray:
    predicted, labels = np.array(cell["answers"]).T
    return predicted == labels


def main() -> None:
    """Run the cells that are missing and print a table for each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", choices=CLASSES, default=["sst2"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--keeps", nargs="+", help="default: those of the size")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--rows", type=int, help="maximum number of dev and test rows")
    parser.add_argument("--fp32", action="store_true", help="train in float32; default: products in bf16")
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
            data=data_file(data),
            keep="100%",
            options={"cooldown": COOLDOWN, "mixed_precision": "no" if args.fp32 else "bf16"},
            steps=size.steps,
            learning_rate=1e-4,
            max_length=64,
            out=args.out / f"{data}-{size.name}",
        )
        axes = {"methods": tuple(args.methods), "keeps": keeps, "seeds": seeds}
        study("grid", StudyRequest(recipe, size, axes=axes), Console())
        order = {name: number for number, name in enumerate(("dense", *args.methods))}
        cells = [  # earlier calls left those of other methods and seeds
            cell
            for cell in read_results(recipe.output.out)
            if cell["settings"]["method"] in order and cell["settings"]["seed"] in seeds
        ]
        cells.sort(key=lambda cell: (order[cell["settings"]["method"]], -cell["heads"], cell["settings"]["seed"]))
        heading = f"{data}, size {size.name}: {size.steps} steps of 32 rows, seeds {seeds}"
        print(f"\n{heading}\n\n{table(cells)}\n", flush=True)


if __name__ == "__main__":
    main()
