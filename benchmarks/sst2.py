"""Joint differentiable subset pruning of MiniLM on SST-2: accuracy of 36, 12 and 6 of 72 heads against dense.

Every run starts from the same weights and learns for the same steps at the same learning rates; the dense one keeps
every head. Checkpoints are chosen on dev, accuracy is reported on test, with a paired bootstrap over the test rows.

    python -m benchmarks.sst2 --size full            # the study of docs/RESULTS.md
    python -m benchmarks.sst2 --size tiny            # one minute

A cell (heads kept, seed) that `--out` already holds is not run again, one that was interrupted resumes, and several
processes started with the same `--out` share the cells among them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor.folder import load
from compressor.heads.learn import learn
from compressor.measure import paired_interval
from compressor.sites import Site, find_sites, hooked
from compressor.tasks import Data, open_data
from compressor.tasks.evaluate import statistics
from graph_passes import Plan

SHARED = Path(__file__).parents[2] / "shared"
ALL = "100%"


@dataclass(frozen=True)
class Size:
    """What one `--size` runs: optimizer steps a cell, heads to keep beside dense, seeds."""

    steps: int
    keep: tuple[str, ...]
    seeds: tuple[int, ...]


SIZES = {
    "tiny": Size(20, ("36",), (1,)),
    "small": Size(200, ("36", "6"), (1,)),
    "full": Size(800, ("12", "36", "6"), (1, 2, 3)),
}
OPTIONS = {"cooldown": 0.4, "evaluations": 4}
"""In a run this short the choice settles early: the rest of it goes to learning with the heads that stay."""

ALLOWED = {"36": 1.0, "12": 3.0, "6": 5.5}
"""Points of accuracy that a plan may cost."""


@dataclass(frozen=True)
class Recipe:
    """The fields of a run that data and learning ask for."""

    data: str
    keep: str
    steps: int
    seed: int
    options: Mapping[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    method: str = "dsp"
    epochs: float = 1.0
    batch_size: int = 32
    learning_rate: float = 1e-4
    max_length: int = 64
    eval_data: str | None = None
    test_data: str | None = None
    max_drop: float | None = None
    guarantee: float | None = None
    ray: str | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str | None = None
    metric: str | None = None


def predictions(model: Any, sites: list[Site], plan: Plan, data: Data, rows: Any) -> np.ndarray:
    """(predicted, true) of every row of `rows`, `[rows, 2]`, with the heads that `plan` drops at zero."""
    gates = {site.name: torch.tensor(plan[site.name].gate)[:, None] for site in sites}

    def forward(batch: dict[str, torch.Tensor]) -> np.ndarray:
        found: np.ndarray = model(**batch).logits.numpy()
        return found

    model.eval()
    with torch.no_grad(), hooked(model, lambda name, out: out * gates[name]):
        return statistics(data.task, rows, forward)


def run_cell(recipe: Recipe, model_path: Path, work: Path) -> dict[str, Any]:
    """Learn one cell and score it on dev and test."""
    started = time.perf_counter()
    folder = load(model_path)
    data = open_data(recipe, folder)
    sites = find_sites(folder.model, data.task.collate(data.eval.select(range(2)).to_list()))
    learned = learn(folder.model, sites, data, recipe, work)
    dev = predictions(folder.model, sites, learned.plan, data, data.eval)
    test = predictions(folder.model, sites, learned.plan, data, data.test)
    shutil.rmtree(work)
    return {
        "recipe": asdict(recipe),
        "heads": learned.plan.heads_kept,
        "kept": {site.name: site.kept for site in learned.plan.sites},
        "dev": data.task.score(dev),
        "test": data.task.score(test),
        "right": (test[:, 0] == test[:, 1]).astype(int).tolist(),
        "curves": [point.model_dump() for point in learned.curves],
        "seconds": time.perf_counter() - started,
        "threads": torch.get_num_threads(),
    }


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Whether the cell of `file` is still to be run, by this process alone. A claim ends with its process."""
    with file.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield not file.exists()


def table(cells: list[dict[str, Any]]) -> str:
    """The study as Markdown: a row a cell, then a row a number of heads over all its seeds."""
    dense = {cell["recipe"]["seed"]: cell for cell in cells if cell["recipe"]["keep"] == ALL}
    lines = ["| heads | seed | dev | test | test minus dense, points (95%) | wall s |", "|---|---|---|---|---|---|"]
    for cell in cells:
        base = dense.get(cell["recipe"]["seed"])
        difference = "" if base is None or base is cell else _difference([cell], [base])
        lines.append(
            f"| {cell['heads']} | {cell['recipe']['seed']} | {100 * cell['dev']:.2f} | {100 * cell['test']:.2f} |"
            f" {difference} | {cell['seconds']:.0f} |"
        )
    for keep in dict.fromkeys(cell["recipe"]["keep"] for cell in cells):
        same = [cell for cell in cells if cell["recipe"]["keep"] == keep]
        bases = [dense[cell["recipe"]["seed"]] for cell in same if cell["recipe"]["seed"] in dense]
        difference = "" if keep == ALL or len(bases) < len(same) else _difference(same, bases)
        if difference and keep in ALLOWED:
            difference += f", allowed -{ALLOWED[keep]}"
        dev, test = (100 * float(np.mean([cell[split] for cell in same])) for split in ("dev", "test"))
        lines.append(f"| **{same[0]['heads']}** | mean of {len(same)} | {dev:.2f} | {test:.2f} | {difference} | |")
    return "\n".join(lines)


def _difference(cells: list[dict[str, Any]], bases: list[dict[str, Any]]) -> str:
    """Points of test accuracy over all seeds; each draw of the bootstrap takes the same rows of every run."""
    dense, joint = (np.mean([cell["right"] for cell in side], axis=0) for side in (bases, cells))
    found = paired_interval(dense, joint, lambda right: 100 * float(right.mean()), seed=0, resamples=10_000)
    return f"{found.difference:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def main() -> None:
    """Run the cells that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "sst2.tsv.xz")
    parser.add_argument("--model", type=Path, default=SHARED / "models" / "minilm-sst2")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--out", type=Path, default=Path("build/sst2"), help="one JSON file a cell, and checkpoints")
    args = parser.parse_args()
    for path in (args.data, args.model):
        if not path.exists():
            print(f"skipped: {path} is not on this machine; give --data and --model")
            return
    size = SIZES[args.size]
    seeds = tuple(args.seeds or size.seeds)
    print(f"size {args.size}: {size.steps} steps of 32 rows, heads {', '.join((ALL, *size.keep))}, seeds {seeds}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for keep in (*size.keep, ALL):
            file = args.out / f"{args.size}-{keep.rstrip('%')}-{seed}.json"
            with claimed(file) as free:
                if not free:
                    continue
                cell = run_cell(
                    Recipe(str(args.data), keep, size.steps, seed), args.model, file.with_suffix(".partial")
                )
                beside = file.with_suffix(".writing")
                beside.write_text(json.dumps(cell))
                beside.replace(file)
                print(f"{cell['heads']} heads, seed {seed}: dev {cell['dev']:.4f}, test {cell['test']:.4f}", flush=True)
    found = [json.loads(path.read_text()) for path in sorted(args.out.glob(f"{args.size}-*.json"))]
    print(table(sorted(found, key=lambda cell: (-cell["heads"], cell["recipe"]["seed"]))))


if __name__ == "__main__":
    main()
