"""Train MiniLM on SQuAD, as a dense model to compress, and print its exact match and F1.

    python -m benchmarks.question_answering --size small    # writes build/question_answering/small/model
    python -m benchmarks.question_answering --size tiny     # one minute; learns nothing useful
    python -m benchmarks.question_answering --size small --shares 0 0.5 0.8 0.9 --block 16 32
    cd build/question_answering/small && compress model --data rows.jsonl --max-length 384 --keep 50% -o half

`--shares` adds table 10 of attention pruning: the model is trained further with masks that drop each share of its
blocks (0: without masks, for as many steps), and its engine is built (with `--kernel`: with the compiled kernel),
scored, and timed against the dense one. Finished rows are not computed again.

The encoder is that of a classification model (`--encoder`), with a new head for spans. The rows of a size are drawn
once and saved beside the model, so that all runs that start from it use the same rows: train and dev rows of the data,
and as test rows a part of the dev rows that did not select the checkpoint (the best by F1). An interrupted run resumes
from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from benchmarks.machine import machine
from benchmarks.question_answering_model import SIZES, Size, open_model, train
from benchmarks.speed import table
from benchmarks.stored import require_settings
from benchmarks.studies.findings import difference_text
from compressor import compress
from compressor.cli.console import Console
from compressor.config.fields import flag_of
from compressor.config.run import Recipe
from compressor.model_folder import ModelFolder
from compressor.targets import BuildOptions, target
from compressor.tasks import Data, statistics
from compressor.tasks.scoring import forward_of
from graph_passes.files import write_text

SHARED = Path(__file__).parents[2] / "shared"


def score(folder: ModelFolder, data: Data) -> None:
    """Print exact match and F1 on the test rows, with 95% intervals of a bootstrap."""
    start_time = time.perf_counter()
    with torch.inference_mode():
        answers = 100 * statistics(data.task, data.test, forward_of(data.task, folder.model))
    draws = np.random.default_rng(0).integers(0, len(answers), (1000, len(answers)))
    ends = np.quantile(answers[draws].mean(1), [0.025, 0.975], axis=0)
    for column, name in ((1, "exact match"), (0, "F1")):
        low, high = ends[:, column]
        print(f"{name} on {len(answers)} test rows: {answers[:, column].mean():.2f} (95%: {low:.2f} to {high:.2f})")
    print(f"scored in {time.perf_counter() - start_time:.0f} s", flush=True)


_RANKING = ("weight_by_count", "allow_empty_rows")
_MASK_FLAGS = ("mask_all_sites", *_RANKING, "kernel")
"""Flags of this script that are also fields of the recipe of runs with masks."""


def compressed(model: Path, size: Size, share: float, block: int, args: argparse.Namespace) -> dict[str, Any]:
    """Drop a share of the blocks, train further, and build, time and score the engine.

    Args:
        model: the dense model folder.
        size: rows and schedule.
        share: share of the blocks to drop; 0: no masks.
        block: positions along the side of a block.
        args: flags of this script.

    Returns:
        `line`, a row of the table; `answers` `[row, (F1, exact match)]` of the engine; and the `settings`, by which a
        stored result is recognized.
    """
    flags = "".join(f"-{name}" for name in _MASK_FLAGS if getattr(args, name))
    steps = "" if args.again is None else f"-{args.again}"
    out = model.with_name((f"p{share:g}-b{block}{flags}" if share else "p0") + steps)
    file = out.with_name(f"{out.name}.json")
    settings = {**asdict(size), "seconds": args.seconds, **({"kernel": str(args.kernel)} if args.kernel else {})}
    if file.is_file() and (stored := json.loads(file.read_text()))["settings"] == settings:
        return dict(stored)
    recipe = _masked_recipe(model, size, share, block, out, args)
    report = compress(recipe, Console())
    _, data = open_model(model, size)
    answers = _engine_answers(recipe, data)
    f1, exact = 100 * answers.mean(axis=0)[:2]
    (speed,) = report.speeds
    peaks = [facts.peak_memory_bytes or 0 for facts in (report.dense, report.compressed)]
    line = {
        "p": f"{share:g}",
        "block": block if share else "",
        "cut": " ".join(flag_of(name) for name in _RANKING if share and getattr(args, name)),
        "block-sparse": f"{sum(site.form == 'block-sparse' for site in report.blocks)} of {len(report.plan.sites)}",
        "exact match": f"{exact:.2f}",
        "F1": f"{f1:.2f}",
        "time, ms": f"{speed.dense.p50:.1f} to {speed.compressed.p50:.1f}",
        "times faster": f"{speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})",
        "peak memory, MiB": " to ".join(f"{peak / 2**20:.0f}" for peak in peaks),
    }
    result = {"settings": settings, "line": line, "answers": answers.tolist()}
    write_text(file, json.dumps(result))
    return result


def _masked_recipe(model: Path, size: Size, share: float, block: int, out: Path, args: argparse.Namespace) -> Recipe:
    """The recipe of a run of `compressed`, which is written to `out`; the other arguments are those of `compressed`."""
    masks: dict[str, Any] = {"keep": "100%"}
    if share:
        masks = {"drop_blocks": share, "block_size": block, **{name: getattr(args, name) for name in _MASK_FLAGS}}
    return Recipe.model_validate(
        {
            "model": model,
            "data": str(model.with_name("rows.jsonl")),
            "max_length": size.max_length,
            "stride": size.stride,
            "training_steps": size.again,
            "batch_size": size.batch,
            "learning_rate": size.learning_rate,
            "options": {"evaluations": size.evaluations, "mixed_precision": size.mixed_precision},
            "batch": (1,),
            "seq": (size.max_length,),
            "seconds": args.seconds,
            "out": out,
            "force": True,
            **masks,
        }
    )


def _engine_answers(recipe: Recipe, data: Data) -> np.ndarray:
    """F1 and exact match of every test row, `[row, (F1, exact match)]`, with the engine of a finished run."""
    with tempfile.TemporaryDirectory() as scratch:
        options = BuildOptions(kernel=recipe.engine.kernel)
        graph = recipe.output.out / "model.onnx"
        engine = target("ort")(graph, Path(scratch) / "engine.onnx", provider="cpu", options=options)

        return statistics(data.task, data.test, lambda batch: data.task.logits(engine.run(batch)))


def main() -> None:
    """Train the model unless it exists, print exact match and F1, and the table of `--shares`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "squad.jsonl.xz")
    parser.add_argument("--encoder", type=Path, default=SHARED / "models" / "minilm-sst2")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[], help="shares of the blocks to drop, for the table"
    )
    parser.add_argument("--block", type=int, nargs="+", default=[16, 32], help="positions along the side of a block")
    parser.add_argument(
        "--mask-all-sites", action="store_true", help="mask every site, even if that is not faster here"
    )
    parser.add_argument(
        "--weight-by-count", action="store_true", help="rank blocks by the attention of all rows together"
    )
    parser.add_argument("--allow-empty-rows", action="store_true", help="allow a row of blocks to lose all of them")
    parser.add_argument("--again", type=int, metavar="STEPS", help="further steps; default: those of the size")
    parser.add_argument("--kernel", type=Path, help="library of compress kernel; default: the function in plain ONNX")
    parser.add_argument("--seconds", type=float, default=20.0, help="approximate time of each measurement")
    parser.add_argument(
        "--out", type=Path, default=Path("build/question_answering"), help="parent of a folder per size"
    )
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
    require_settings(out, data=str(args.data.resolve()), encoder=str(args.encoder.resolve()))
    model = out / "model"
    if not model.exists():
        train(args, size, out)
    folder, data = open_model(model, size)
    if torch.cuda.is_available():
        folder.model.to("cuda")
    for note in data.notes:
        print(note)
    score(folder, data)
    lines: list[dict[str, Any]] = []
    dense: dict[str, Any] | None = None
    for share, block in dict.fromkeys((share, block if share else 0) for block in args.block for share in args.shares):
        cell = compressed(model, size, share, block, args)
        dense = dense if share else cell
        difference = difference_text(data.task, [dense], [cell]) if share and dense else ""
        lines.append({**cell["line"], "F1 minus p = 0": difference})
        print(lines[-1], flush=True)
    if lines:
        print(f"\n{len(data.test)} test rows, {size.max_length} tokens, batch 1; dense to compressed, 95% intervals\n")
        print(table(lines))


if __name__ == "__main__":
    main()
