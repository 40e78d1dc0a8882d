"""MiniLM learns to answer SQuAD's questions: a dense model to compress, with its exact match and F1.

    python -m benchmarks.question_answering --size small    # the model, into build/question_answering/small/model
    python -m benchmarks.question_answering --size tiny     # one minute, learns nothing worth having
    python -m benchmarks.question_answering --size small --shares 0 0.5 0.8 0.9 --block 16 32
    cd build/question_answering/small && compress model --data rows.jsonl --max-length 384 --keep 50% -o half

With `--shares` comes table 10 of attention pruning: the model learns on with masks that drop each share of its blocks
(0: with none, for as many steps), is planned and built (`--kernel`: with the compiled kernel), and its engine is scored
and timed beside the dense one. What is done already is not done again.

The encoder is that of a folder that classifies (`--encoder`), under a fresh head for spans. The rows of a size are
drawn from the data once and lie beside the model, so that what begins with it reports on the same ones: train and dev
rows of the data, and as test rows a part of its dev rows that the checkpoint, the best by F1 on the others, was not
chosen on. A run that was interrupted goes on from its last checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, set_seed

from benchmarks.machine import machine
from benchmarks.speed import table
from compressor import compress
from compressor.cli.console import Console
from compressor.config.run import Recipe, flag_of
from compressor.model_folder import ModelFolder, load
from compressor.silence_libraries import quiet_transformers
from compressor.studies.cell_store import write
from compressor.studies.grid import told_difference
from compressor.targets import BuildOptions, target
from compressor.tasks import Data, open_data, statistics
from compressor.tasks.splits import named_splits
from compressor.training.fit import fit
from compressor.training.schedule import MixedPrecision, Schedule

SHARED = Path(__file__).parents[2] / "shared"


@dataclass(frozen=True)
class Size:
    """Rows and schedule of one `--size`: `train` is the most that is learned from, None for all; `again` are the steps
    that the model learns on for with masks, or without to compare."""

    train: int | None
    dev: int
    test: int
    max_length: int
    stride: int
    steps: int
    again: int
    batch: int
    evaluations: int
    learning_rate: float
    mixed_precision: MixedPrecision


SIZES = {
    "tiny": Size(32, 8, 16, 64, 16, 4, 4, 4, 1, 1e-4, "no"),
    "small": Size(7200, 200, 500, 384, 128, 900, 900, 8, 3, 1e-4, "bf16"),
    "paper": Size(None, 1000, 7000, 384, 128, 2600, 2600, 16, 6, 1e-4, "no"),
}


@dataclass(frozen=True)
class Request:
    """Which rows to use; see `compressor.tasks.DataRequest`."""

    data: str
    max_length: int
    stride: int
    eval_data: str | None = None
    test_data: str | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str | None = None
    metric: str | None = None
    seed: int = 0


def start(encoder: Path, folder: Path) -> None:
    """Write the model folder as it is before learning: the encoder in full precision, and a head of random weights."""
    AutoModelForQuestionAnswering.from_pretrained(encoder, num_labels=2, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)


def draw(source: Path, size: Size, path: Path) -> None:
    """Write the rows of the size, one an object a line."""
    splits = named_splits(str(source))
    train, dev = (splits[name].shuffle(seed=0) for name in ("train", "dev"))
    parts = {
        "train": train.take(len(train) if size.train is None else size.train),
        "dev": dev.take(size.dev),
        "test": dev.skip(size.dev).take(size.test),
    }
    with path.open("w", encoding="utf-8") as file:
        for split, rows in parts.items():
            for row in rows.select_columns(["id", "question", "context", "answers"]):
                file.write(json.dumps({"split": split, **row}) + "\n")


def opened(path: Path, size: Size) -> tuple[ModelFolder, Data]:
    """The model folder, and the rows that lie beside it."""
    folder = load(path)
    return folder, open_data(Request(str(path.with_name("rows.jsonl")), size.max_length, size.stride), folder)


def learn(folder: ModelFolder, data: Data, size: Size, checkpoints: Path) -> None:
    """Train in place, from the last checkpoint on where there is one, and end at the best."""
    schedule = Schedule(
        steps=size.steps,
        batch_size=size.batch,
        learning_rate=size.learning_rate,
        seed=0,
        warmup=0.1,
        weight_decay=0.01,
        max_grad_norm=1.0,
        evaluations=size.evaluations,
        points=size.evaluations,
        mixed_precision=size.mixed_precision,
    )
    with Console().stage("learning to answer") as tell:
        log = fit(folder.model.train(), data, schedule, asdict(size), checkpoints, tell)
    for entry in log:
        if (name := f"eval_{data.task.metric}") in entry:
            print(f"step {entry['step']}: {data.task.metric} on {len(data.eval)} dev rows {100 * entry[name]:.2f}")


def score(folder: ModelFolder, data: Data) -> None:
    """Print exact match and F1 on the test rows, with how sure they are: a bootstrap's 95%."""
    model = folder.model.eval()

    def forward(batch: dict[str, Tensor]) -> np.ndarray:
        return data.task.scored(model(**{name: tensor.to(model.device) for name, tensor in batch.items()}))

    began = time.perf_counter()
    with torch.inference_mode():
        found = 100 * statistics(data.task, data.test, forward)
    draws = np.random.default_rng(0).integers(0, len(found), (1000, len(found)))
    ends = np.quantile(found[draws].mean(1), [0.025, 0.975], axis=0)
    for column, name in ((1, "exact match"), (0, "F1")):
        low, high = ends[:, column]
        print(f"{name} on {len(found)} test rows: {found[:, column].mean():.2f} (95%: {low:.2f} to {high:.2f})")
    print(f"scored in {time.perf_counter() - began:.0f} s", flush=True)


_CUT = ("weigh_by_rows", "empty_rows")
_HOW = ("everywhere", *_CUT, "kernel")
"""Flags of this script that are those of the runs with masks."""


def compressed(model: Path, size: Size, share: float, block: int, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table, and the engine's answers `[row, (F1, exact match)]`: cut, learn on, plan, build, time, and
    score the engine."""
    how = "".join(f"-{name}" for name in _HOW if getattr(args, name))
    steps = "" if args.again is None else f"-{args.again}"
    out = model.with_name((f"p{share:g}-b{block}{how}" if share else "p0") + steps)
    line, rows = out.with_name(f"{out.name}.json"), model.with_name("rows.jsonl")
    settings = {**asdict(size), "seconds": args.seconds}
    if line.is_file() and (kept := json.loads(line.read_text()))["settings"] == settings:
        return dict(kept)
    asked: dict[str, Any] = {"keep": "100%"}
    if share:
        asked = {"blocks": share, "block_size": block, **{name: getattr(args, name) for name in _HOW}}
    recipe = Recipe.model_validate(
        {
            "model": model,
            "data": str(rows),
            "max_length": size.max_length,
            "stride": size.stride,
            "steps": size.again,
            "batch_size": size.batch,
            "learning_rate": size.learning_rate,
            "options": {"evaluations": size.evaluations, "mixed_precision": size.mixed_precision},
            "batch": (1,),
            "seq": (size.max_length,),
            "seconds": args.seconds,
            "out": out,
            "force": True,
            **asked,
        }
    )
    report = compress(recipe, Console())
    _, data = opened(model, size)
    with tempfile.TemporaryDirectory() as scratch:
        tuning = BuildOptions(kernel=recipe.kernel)
        engine = target("ort")(out / "model.onnx", Path(scratch) / "engine.onnx", provider="cpu", tuning=tuning)

        def forward(batch: dict[str, Tensor]) -> np.ndarray:
            return data.task.scored(engine.run({name: value.numpy() for name, value in batch.items()}))

        answers = statistics(data.task, data.test, forward)
    f1, exact = 100 * answers.mean(axis=0)[:2]
    (speed,) = report.speeds
    peaks = [side.peak_memory_bytes or 0 for side in (report.dense, report.compressed)]
    found = {
        "p": f"{share:g}",
        "block": block if share else "",
        "cut": " ".join(flag_of(name) for name in _CUT if share and getattr(args, name)),
        "block-sparse": f"{sum(site.form == 'block-sparse' for site in report.blocks)} of {len(report.plan.sites)}",
        "exact match": f"{exact:.2f}",
        "F1": f"{f1:.2f}",
        "time, ms": f"{speed.dense.p50:.1f} to {speed.compressed.p50:.1f}",
        "times faster": f"{speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})",
        "peak memory, MiB": " to ".join(f"{peak / 2**20:.0f}" for peak in peaks),
    }
    kept = {"settings": settings, "line": found, "answers": answers.tolist()}
    write(line, json.dumps(kept))
    return kept


def main() -> None:
    """Learn, unless the model is there already, and print exact match and F1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "squad.jsonl.xz")
    parser.add_argument("--encoder", type=Path, default=SHARED / "models" / "minilm-sst2")
    parser.add_argument("--shares", type=float, nargs="+", default=[], help="of the blocks to drop, for the table")
    parser.add_argument("--block", type=int, nargs="+", default=[16, 32], help="positions along a block's side")
    parser.add_argument("--everywhere", action="store_true", help="mask every site, whether or not it pays here")
    parser.add_argument(
        "--weigh-by-rows", action="store_true", help="rank blocks by the attention of all rows together"
    )
    parser.add_argument("--empty-rows", action="store_true", help="let a row of blocks lose every one")
    parser.add_argument("--again", type=int, metavar="STEPS", help="learn on for so many steps; else the size's")
    parser.add_argument("--kernel", type=Path, help="library of compress kernel; else the function of plain ONNX")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long to time each engine")
    parser.add_argument("--out", type=Path, default=Path("build/question_answering"), help="a folder a size")
    args = parser.parse_args()
    for path, flag in ((args.data, "--data"), (args.encoder, "--encoder")):
        if not path.exists():
            print(f"skipped: {path} is not on this machine; give {flag}")
            return
    size, out = SIZES[args.size], args.out / args.size
    if args.again is not None:
        size = replace(size, again=args.again)
    print(f"size {args.size}: {size}\n{machine('torch', 'transformers')}", flush=True)
    set_seed(0)
    done, partial = out / "model", out / "partial"
    if not done.exists():
        if not (partial / "started").exists():
            with quiet_transformers():
                start(args.encoder, partial / "model")
            draw(args.data, size, partial / "rows.jsonl")
            (partial / "started").touch()
        began = time.perf_counter()
        folder, data = opened(partial / "model", size)
        learn(folder, data, size, partial / "checkpoints")
        print(f"{folder.model.num_parameters():,} parameters, {time.perf_counter() - began:.0f} s", flush=True)
        with quiet_transformers():
            folder.model.to("cpu").save_pretrained(partial / "model")  # type: ignore[arg-type]
        (partial / "rows.jsonl").replace(out / "rows.jsonl")
        (partial / "model").rename(done)
        shutil.rmtree(partial)
    folder, data = opened(done, size)
    if torch.cuda.is_available():
        folder.model.to("cuda")  # type: ignore[arg-type]
    for note in data.notes:
        print(note)
    score(folder, data)
    lines: list[dict[str, Any]] = []
    dense: dict[str, Any] | None = None
    for share, block in dict.fromkeys((share, block if share else 0) for block in args.block for share in args.shares):
        cell = compressed(done, size, share, block, args)
        dense = dense if share else cell
        lost = told_difference(data.task, [dense], [cell]) if share and dense else ""
        lines.append({**cell["line"], "F1 minus p = 0": lost})
        print(lines[-1], flush=True)
    if lines:
        print(f"\n{len(data.test)} test rows, {size.max_length} tokens, batch 1; dense to compressed, 95% intervals\n")
        print(table(lines))


if __name__ == "__main__":
    main()
