"""Compute attention maps of long texts, from which `benchmarks.block_sparse --maps` derives masks.

    python -m benchmarks.long_maps --length 1024 2048 4096
    python -m benchmarks.block_sparse --maps build/long_maps/1024.safetensors --share 0.9

MiniLM has 512 positions, which are stretched to each length by linear interpolation. A text consists of reviews of one
sentiment, as many as fit the length; the model is trained to classify them for some steps, and its maps are averaged
as by `compress run --drop-blocks`. Its heads have width 32; `block_sparse` times 12 heads of width 64 with their masks.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn import Embedding
from torch.nn.functional import interpolate
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.grid import MODEL
from benchmarks.machine import machine
from benchmarks.stored import require_settings
from compressor.block_masks.attention_maps import collect_attention_maps
from compressor.cli.console import Console
from compressor.config.sections import RowsConfig
from compressor.model_folder import example_inputs, load
from compressor.silence_libraries import quiet_transformers
from compressor.tasks import open_data
from compressor.tasks.splits import named_splits
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.schedule import Schedule
from compressor.units import find_sites, keep_all

DATA = MODEL.parents[1] / "data" / "imdb.tsv.xz"
_LETTERS = 6
"""Letters per token that suffice to fill a length."""


def stretch(length: int, folder: Path) -> None:
    """Write MiniLM with `length` positions."""
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, dtype=torch.float32)
    embeddings = model.base_model.embeddings
    weights = embeddings.position_embeddings.weight.detach()
    longer = interpolate(weights.T[None], length, mode="linear", align_corners=True)[0].T.contiguous()
    embeddings.position_embeddings = Embedding.from_pretrained(longer, freeze=False)
    model.config.max_position_embeddings = length
    model.config.attention_probs_dropout_prob = 0.0  # with dropout PyTorch stores whole maps: 14 GB at 4,096 tokens
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL, model_max_length=length).save_pretrained(folder)


def join(source: Path, length: int, rows: int, path: Path) -> None:
    """Write rows of joined reviews, with the sentiments in turn; two of eight rows select the checkpoint.

    Args:
        source: the file of reviews.
        length: minimum number of tokens of a row.
        rows: number of rows.
        path: the file to write.
    """
    draw, reviews = random.Random(0), dict[int, list[str]]()
    for row in named_splits(str(source))["train"]:
        reviews.setdefault(int(row["label"]), []).append(" ".join(row["text"].split()))
    labels = itertools.islice(itertools.cycle(sorted(reviews)), rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, delimiter="\t")
        lines.writerow(["split", "label", "text"])
        for number, label in enumerate(labels):
            text = ""
            while len(text) < length * _LETTERS:
                text += draw.choice(reviews[label]) + " "
            lines.writerow(["dev" if number % 8 > 5 else "train", label, text])


def make(length: int, out: Path, args: argparse.Namespace) -> None:
    """Train MiniLM at a length and write its average maps.

    Args:
        length: number of positions.
        out: the file to write.
        args: options of the command line.
    """
    stage = Console().stage(f"{length} tokens: training, averaging maps")
    with tempfile.TemporaryDirectory() as scratch, stage as on_progress:
        path, rows = Path(scratch) / "model", Path(scratch) / "rows.tsv"
        with quiet_transformers():
            stretch(length, path)
        join(args.data, length, args.rows, rows)
        folder = load(path)
        data = open_data(RowsConfig(data=str(rows), max_length=length, stride=0), folder)
        schedule = Schedule(
            steps=args.steps,
            batch_size=args.batch_size,
            learning_rate=5e-5,
            seed=0,
            warmup=0.1,
            weight_decay=0.01,
            max_grad_norm=1.0,
            evaluations=1,
            points=1,
            mixed_precision="bf16",
        )
        checkpoints = Checkpoints(Path(scratch) / "checkpoints", asdict(schedule))
        fit(folder.model.train(), data, schedule, checkpoints, on_progress=on_progress)
        sites = find_sites(folder.model, example_inputs(folder, batch=2, seq=8))
        maps = collect_attention_maps(folder.model, sites, data, keep_all(sites), length=length, batch_size=1)
        maps.save(out)


def main() -> None:
    """Write the maps of the lengths that have none yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", type=int, default=64, help="joined reviews to train on and to average maps over")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=2, help="rows per step; 1 needs half of the memory")
    parser.add_argument("--out", type=Path, default=Path("build/long_maps"))
    args = parser.parse_args()
    if not MODEL.exists() or not args.data.exists():
        print(f"skipped: {MODEL} or {args.data} is not on this machine")
        return
    print(f"machine: {machine('torch', 'transformers')}", flush=True)
    sizes = {"rows": args.rows, "steps": args.steps, "batch_size": args.batch_size}
    require_settings(args.out, data=str(args.data.resolve()), **sizes)
    for length in args.length:
        if not (path := args.out / f"{length}.safetensors").exists():
            make(length, path, args)
            print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
