"""Joint differentiable subset pruning of MiniLM on SST-2: accuracy of 36, 12 and 6 of 72 heads against dense.

`compress study grid` with one method. Every run starts from the same weights and learns for the same steps at the same
learning rates; the dense one keeps every head. Checkpoints are chosen on dev, accuracy is reported on test, with a
paired bootstrap over the test rows.

    python -m benchmarks.sst2 --size full            # the study of docs/RESULTS.md
    python -m benchmarks.sst2 --size tiny            # one minute

A cell (heads kept, seed) that `--out` already holds is not run again, one that was interrupted resumes, and several
processes started with the same `--out` share the cells among them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor.cli.view import View
from compressor.measure import paired_interval
from compressor.recipe import Recipe
from compressor.study import Asked, Size, study

SHARED = Path(__file__).parents[2] / "shared"


def _size(name: str, steps: int, keeps: tuple[str, ...], seeds: tuple[int, ...]) -> Size:
    """Every row there is; as many optimizer steps a cell, whatever that is in epochs."""
    return Size(name, None, None, None, 1.0, steps, seeds, keeps, 4, 1000, 100, 10, 3.0)


SIZES = {
    "tiny": _size("tiny", 20, ("36",), (1,)),
    "small": _size("small", 200, ("36", "6"), (1,)),
    "full": _size("full", 800, ("36", "12", "6"), (1, 2, 3)),
}
OPTIONS = {"cooldown": 0.4, "evaluations": 4}
"""In a run this short the choice settles early: the rest of it goes to learning with the heads that stay."""

ALLOWED = {36: 1.0, 12: 3.0, 6: 5.5}
"""Points of accuracy that a plan may cost."""


def table(cells: list[dict[str, Any]]) -> str:
    """The study as Markdown: a row a cell, then a row a number of heads over all its seeds."""
    dense = {cell["asked"]["seed"]: cell for cell in cells if cell["asked"]["method"] == "dense"}
    lines = ["| heads | seed | dev | test | test minus dense, points (95%) | wall s |", "|---|---|---|---|---|---|"]
    for cell in cells:
        base = dense[cell["asked"]["seed"]]
        difference = "" if base is cell else _difference([cell], [base])
        lines.append(
            f"| {cell['heads']} | {cell['asked']['seed']} | {100 * cell['eval']:.2f} | {100 * cell['test']:.2f} |"
            f" {difference} | {cell['seconds']:.0f} |"
        )
    for heads in dict.fromkeys(cell["heads"] for cell in cells):
        same = [cell for cell in cells if cell["heads"] == heads]
        bases = [dense[cell["asked"]["seed"]] for cell in same]
        difference = "" if same == bases else _difference(same, bases)
        if difference and heads in ALLOWED:
            difference += f", allowed -{ALLOWED[heads]}"
        dev, test = (100 * float(np.mean([cell[split] for cell in same])) for split in ("eval", "test"))
        lines.append(f"| **{heads}** | mean of {len(same)} | {dev:.2f} | {test:.2f} | {difference} | |")
    return "\n".join(lines)


def _difference(cells: list[dict[str, Any]], bases: list[dict[str, Any]]) -> str:
    """Points of test accuracy over all seeds; each draw of the bootstrap takes the same rows of every run."""
    dense, joint = (np.mean([_right(cell) for cell in side], axis=0) for side in (bases, cells))
    found = paired_interval(dense, joint, lambda right: 100 * float(right.mean()), seed=0, resamples=10_000)
    return f"{found.difference:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def _right(cell: dict[str, Any]) -> np.ndarray:
    predicted, true = np.array(cell["answers"]).T
    return predicted == true


def main() -> None:
    """Run the cells that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "sst2.tsv.xz")
    parser.add_argument("--model", type=Path, default=SHARED / "models" / "minilm-sst2")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--out", type=Path, default=Path("build/sst2"), help="a study's folder for each size")
    args = parser.parse_args()
    for path in (args.data, args.model):
        if not path.exists():
            print(f"skipped: {path} is not on this machine; give --data and --model")
            return
    size = SIZES[args.size]
    seeds = tuple(args.seeds or size.seeds)
    print(
        f"size {size.name}: {size.steps} steps of 32 rows, heads 72, {', '.join(map(str, size.keeps))}, seeds {seeds}"
    )
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    recipe = Recipe(
        model=args.model,
        data=str(args.data),
        keep="100%",
        options=OPTIONS,
        steps=size.steps,
        learning_rate=1e-4,
        max_length=64,
        out=args.out / size.name,
    )
    study("grid", Asked(recipe, size, axes={"methods": ("dsp",), "seeds": seeds}), View())
    found = [json.loads(path.read_text()) for path in sorted(recipe.out.glob("cells/*.json"))]
    print(table(sorted(found, key=lambda cell: (-cell["heads"], cell["asked"]["seed"]))))


if __name__ == "__main__":
    main()
