"""Train a ViT on handwritten digits, prune it, and print what its engines lose and win against the whole model's.

    python -m benchmarks.images                                          # half and a third of the multiply-accumulates
    python -m benchmarks.images --repeats 0                              # accuracy only
    python -m benchmarks.images --engines openvino-int8 --distill

The images are those of scikit-learn (`load_digits`, 8 × 8 pixels, 1,797 rows), enlarged to 32 × 32 and written as PNG
files into a folder for each split and class; training images are there four times, shifted by up to two pixels. The
ViT has 2.7 million parameters and is trained from scratch; an interrupted training goes on where it ended. Labels are
not used after that. Each row of the table is one run of `compress`, a folder under `--out`; finished runs are not
repeated. Accuracy is that of the engines on the test images, with a paired 95% interval against the dense engine.
Engines are timed as in `benchmarks.budgets`, against ONNX Runtime's own fused engine of the whole model in fp32.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil, set_seed

from benchmarks.budgets import speed_columns
from benchmarks.machine import machine
from benchmarks.quantization import repeated, run
from benchmarks.speed import table
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.sections import RowsConfig
from compressor.model_folder import load
from compressor.results import Report
from compressor.silence_libraries import quiet_transformers
from compressor.targets import target
from compressor.tasks import open_data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.schedule import Schedule
from compressor.workdir import replace_folder

SHARES = (0.5, 1 / 3)
ENGINES = {f"{name}-{precision}": (name, precision) for name in ("ort", "openvino") for precision in ("fp32", "int8")}
DISTILLED = {"distill": True, "distill_steps": 500}
SIZE, PATCH = 32, 8
SPLITS = {"train": 1000, "validation": 297, "test": 500}
"""Images of each split."""
COPIES, SHIFT = 4, 2
"""Copies of a training image, and the most pixels by which one is shifted."""
EPOCHS, BATCH_SIZE, LEARNING_RATE = 6, 32, 5e-4


def digit_names() -> list[str]:
    """The names of the classes, in order."""
    return [f"digit {number}" for number in range(10)]


def write_digits(folder: Path) -> Path:
    """The folder of images, written if it is not there yet."""
    path, partial = folder / "rows", folder / "rows.partial"
    if path.exists():
        return path
    digits = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    ends = np.cumsum(list(SPLITS.values()))
    for split, rows in zip(SPLITS, np.split(order[: ends[-1]], ends[:-1]), strict=True):
        for row, copy in itertools.product(rows.tolist(), range(COPIES if split == "train" else 1)):
            pixels = (digits.images[row] * 255 / 16).astype(np.uint8)
            shift = rng.integers(-SHIFT, SHIFT + 1, 2) if copy else (0, 0)
            image = Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
            name = partial / split / digit_names()[digits.target[row]] / f"{row:04}-{copy}.png"
            name.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.roll(np.asarray(image), shift, (0, 1))).save(name)
    replace_folder(partial, path, aside=folder / "rows.old")
    return path


def starting_model(rows: Path, folder: Path) -> Path:
    """The dense model, trained if it is not there yet."""
    path, partial = folder / "model", folder / "model.partial"
    if path.exists():
        return path
    set_seed(0)
    names = dict(enumerate(digit_names()))
    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=768,
        image_size=SIZE,
        patch_size=PATCH,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )
    with quiet_transformers():
        ViTForImageClassification(config).save_pretrained(partial)
        ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(partial)
    loaded = load(partial)
    data = open_data(RowsConfig(data=str(rows)), loaded)
    schedule = Schedule(
        steps=EPOCHS * len(data.train) // BATCH_SIZE,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=0,
        warmup=0.1,
        weight_decay=0.05,
        max_grad_norm=1.0,
        evaluations=6,
        points=6,
        mixed_precision="no",
        scheduler="cosine",
    )
    with Console().stage("training the ViT") as progress:
        checkpoints = Checkpoints(folder / "checkpoints", {"set": "digits"})
        fit(loaded.model.train(), data, schedule, checkpoints, on_progress=progress)
    with quiet_transformers():
        loaded.model.save_pretrained(partial)
    partial.rename(path)
    return path


def reference_engine(model: Path, folder: Path) -> Path:
    """ONNX Runtime's own fused engine of the whole model in fp32, built if it is not there yet."""
    out = folder / "reference"
    run(Recipe(model=model, batch=(1, 8), seconds=2.0, out=out, keep_unread_positions=True))
    return out / "engine.onnx"


def report_of(model: Path, rows: Path, engine: str, share: float, folder: Path, fields: dict[str, Any]) -> Report:
    """The report of one run, which runs if it has not."""
    runtime, precision = ENGINES[engine]
    return run(
        Recipe(
            model=model,
            data=str(rows),
            macs=share,
            target=runtime,
            precision=precision,
            batch=(1, 8),
            seconds=3.0,
            statistics=folder / "statistics",
            out=folder / "budgets" / f"{engine}-macs{share:.3g}",
            **fields,
        )
    )


def columns_of(report: Report, engine: str, share: float) -> dict[str, str]:
    """The plan of a run and its accuracy against dense."""
    score = report.scores[0]
    difference = 100 * (score.compressed - score.dense)
    return {
        "engine": engine,
        "budget": f"{share:.0%} of MACs",
        "heads, neurons": f"{report.plan.heads_kept}, {report.plan.neurons_kept}",
        f"{score.metric} ({score.rows})": f"{100 * score.compressed:.2f}",
        "difference (95%)": f"{difference:+.2f} ({100 * score.low:+.2f} to {100 * score.high:+.2f})",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of multiply-accumulates")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--distill", action="store_true", help="train what is left on the dense model's answers")
    parser.add_argument("--repeats", type=int, default=3, help="processes that time each engine; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/images"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    rows = write_digits(args.out)
    model = starting_model(rows, args.out)
    reference = reference_engine(model, args.out)
    folder = args.out / ("distilled" if args.distill else "pruned")
    printed = []
    for engine, share in itertools.product(args.engines, args.shares):
        report = report_of(model, rows, engine, share, folder, DISTILLED if args.distill else {})
        file = folder / "budgets" / f"{engine}-macs{share:.3g}" / target(ENGINES[engine][0]).engine_file
        ratios = [repeated(reference, file, 1, repeat) for repeat in range(args.repeats)]
        printed.append({**columns_of(report, engine, share), **speed_columns(ratios)})
        print(table(printed[-1:]), flush=True)
    dense = report.scores[0].dense
    print(f"\ndigits, dense: {100 * dense:.2f}\n{table(printed)}", flush=True)


if __name__ == "__main__":
    main()
