"""The dense model of `question_answering`, and its rows."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from compressor.cli.console import Console
from compressor.config.sections import RowsConfig
from compressor.config.values import MixedPrecision
from compressor.model_folder import ModelFolder, load
from compressor.silence_libraries import quiet_transformers
from compressor.tasks import Data, open_data
from compressor.tasks.splits import named_splits
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.schedule import Schedule


@dataclass(frozen=True)
class Size:
    """Rows and schedule of one `--size`.

    Attributes:
        train: maximum number of training rows; None: all.
        dev: evaluation rows.
        test: test rows.
        max_length: tokens of a window.
        stride: tokens that windows share.
        steps: optimizer steps of the dense model.
        again: further steps with masks, or without them as a baseline.
        batch: rows per step.
        evaluations: evaluations during each training.
        learning_rate: peak learning rate.
        mixed_precision: precision of matrix products.
    """

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


def start(encoder: Path, folder: Path) -> None:
    """Write the untrained model folder: the encoder in full precision, and a head of random weights."""
    AutoModelForQuestionAnswering.from_pretrained(encoder, num_labels=2, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)


def draw(source: Path, size: Size, path: Path) -> None:
    """Write the rows of a size as JSON lines."""
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


def open_model(path: Path, size: Size) -> tuple[ModelFolder, Data]:
    """The model folder, and the rows beside it."""
    folder = load(path)
    rows = RowsConfig(data=str(path.with_name("rows.jsonl")), max_length=size.max_length, stride=size.stride)
    return folder, open_data(rows, folder)


def learn(folder: ModelFolder, data: Data, size: Size, checkpoints: Path) -> None:
    """Train in place from the last checkpoint, if there is one; the best checkpoint remains."""
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
    with Console().stage("learning to answer") as progress:
        log = fit(folder.model.train(), data, schedule, Checkpoints(checkpoints, asdict(size)), on_progress=progress)
    for entry in log:
        if (name := f"eval_{data.task.metric}") in entry:
            print(f"step {entry['step']}: {data.task.metric} on {len(data.eval)} dev rows {100 * entry[name]:.2f}")


def train(args: argparse.Namespace, size: Size, out: Path) -> None:
    """Write the dense model and its rows to `out`, from its `partial` folder if a run was interrupted."""
    partial = out / "partial"
    if not (partial / "started").exists():
        with quiet_transformers():
            start(args.encoder, partial / "model")
        draw(args.data, size, partial / "rows.jsonl")
        (partial / "started").touch()
    start_time = time.perf_counter()
    folder, data = open_model(partial / "model", size)
    learn(folder, data, size, partial / "checkpoints")
    print(f"{folder.model.num_parameters():,} parameters, {time.perf_counter() - start_time:.0f} s", flush=True)
    with quiet_transformers():
        folder.model.to("cpu").save_pretrained(partial / "model")
    (partial / "rows.jsonl").replace(out / "rows.jsonl")
    (partial / "model").rename(out / "model")
    shutil.rmtree(partial)
