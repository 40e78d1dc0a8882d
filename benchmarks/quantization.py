"""Quantize MiniLM on several tasks, and print metric and speed of each int8 engine against ONNX Runtime's fused fp32.

    python -m benchmarks.quantization sst2                      # the model of ../shared/models
    python -m benchmarks.quantization sst2 cola stsb mnli       # learns the other models first, and keeps them
    python -m benchmarks.quantization cola --learn              # learns only

For each set, the starting model is learned once (`build/quantization/SET/model`) with its rows beside it. A run without
rows gives the reference: the engine of the whole graph in fp32, fused by ONNX Runtime. Then one run for each runtime
quantizes the model; metrics are those of the runs, on test rows, with paired intervals. The error of the portable graph
is the mean square of the difference to the outputs in fp32, as a share of their mean square, on training rows of which
few are calibration rows. Times are taken afterwards, in `--repeats` fresh processes: reference and engine in turn, with
pauses, in both orders. Finished parts are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    set_seed,
)

from benchmarks.machine import machine
from benchmarks.speed import median_and_range, table
from benchmarks.text_sets import ENCODER, SETS, rows_file
from compressor import compress
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.sections import RowsConfig
from compressor.measure import interleave
from compressor.model_folder import load
from compressor.quantization import output_distance
from compressor.report import load as load_report
from compressor.results import Report
from compressor.silence_libraries import quiet_transformers
from compressor.targets import target
from compressor.targets.trial_inputs import random_feeds
from compressor.tasks import open_data
from compressor.tasks.calibration import calibration_rows
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.schedule import Schedule
from compressor.workdir import QUANTIZED_GRAPH
from graph_passes import load as load_graph

TARGETS = ("ort", "openvino")
COMPARED_ROWS = 200


def starting_model(name: str, folder: Path) -> Path:
    """The dense model of a set, learned from the encoder if it is not there yet."""
    chosen, path = SETS[name], folder / "model"
    rows = rows_file(name, folder)
    if chosen.epochs == 0:
        return ENCODER
    if path.exists():
        return path
    partial = folder / "partial"
    set_seed(0)
    config = AutoConfig.from_pretrained(ENCODER)
    config.num_labels = chosen.labels
    if chosen.auto_class is AutoModelForSequenceClassification:
        config.problem_type = "regression" if chosen.labels == 1 else "single_label_classification"
    with quiet_transformers():
        chosen.auto_class.from_pretrained(  # type: ignore[attr-defined]
            ENCODER, config=config, ignore_mismatched_sizes=True, dtype=torch.float32
        ).save_pretrained(partial)
        AutoTokenizer.from_pretrained(ENCODER).save_pretrained(partial)
    loaded = load(partial)
    data = open_data(RowsConfig(data=str(rows), max_length=chosen.max_length), loaded)
    schedule = Schedule(
        steps=int(chosen.epochs * len(data.train) / chosen.batch),
        batch_size=chosen.batch,
        learning_rate=chosen.learning_rate,
        seed=0,
        warmup=0.1,
        weight_decay=0.01,
        max_grad_norm=1.0,
        evaluations=4,
        points=4,
        mixed_precision=chosen.mixed_precision,
    )
    with Console().stage(f"learning {name}") as progress:
        fit(
            loaded.model.train(),
            data,
            schedule,
            Checkpoints(folder / "checkpoints", {"set": name}),
            on_progress=progress,
        )
    with quiet_transformers():
        loaded.model.save_pretrained(partial)
    partial.rename(path)
    return path


def run(recipe: Recipe) -> Report:
    """The report of a recipe, which is run if its output folder is missing."""
    out = recipe.output.out
    return load_report(out) if out.exists() else compress(recipe, Console())


def timed_fields(model: Path, length: int) -> dict[str, Any]:
    """The fields of a recipe that times a model at batch 1 and 8."""
    return {"model": model, "batch": (1, 8), "seq": (length,), "seconds": 2.0}


def reference_engine(model: Path, length: int, folder: Path) -> Path:
    """ONNX Runtime's own fused engine of a whole model in fp32, built into `folder` if it is not there yet."""
    run(Recipe(**timed_fields(model, length), out=folder / "reference", keep_unread_positions=True))
    return folder / "reference" / "engine.onnx"


def measure(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print the table of one set."""
    model = starting_model(name, folder)
    if args.learn:
        return
    length = SETS[name].max_length
    common = timed_fields(model, length)
    reference = reference_engine(model, length, folder)
    rows = []
    for runtime in args.targets:
        shapes = (f"1x{length}", f"8x{length}") if runtime == "openvino" else ()
        data = {
            "data": str(rows_file(name, folder)),
            "max_length": length,
            "shapes": shapes,
            "metric": SETS[name].metric,
        }
        out = folder / f"{runtime}-int8"
        report = run(Recipe(**common, **data, target=runtime, precision="int8", out=out))
        score, quantized = report.scores[0], report.compressed.quantized
        assert quantized is not None
        ratios = [repeated(reference, out / target(runtime).engine_file, length, seed) for seed in range(args.repeats)]
        speeds = [median_and_range(column) for column in zip(*ratios, strict=True)] or ["", ""]
        rows.append(
            {
                "set (test rows)": f"{name}, {score.metric} ({score.rows})",
                "engine": f"{runtime} int8",
                "dense": f"{100 * score.dense:.2f}",
                "int8": f"{100 * score.compressed:.2f}",
                "95% of the difference": f"{100 * score.low:+.2f} to {100 * score.high:+.2f}",
                "batch 1": speeds[0],
                "batch 8": speeds[1],
                "error": portable_error(name, out, length, folder),
                "products in int8": f"{quantized.executed} of {quantized.requested}",
                "file": f"{report.compressed.file_bytes / report.dense.file_bytes:.2f}",
            }
        )
    print(table(rows), flush=True)


def portable_error(name: str, out: Path, length: int, folder: Path) -> str:
    """The error of the portable graph of a run; empty where there is none."""
    quantized = out / QUANTIZED_GRAPH
    if not quantized.exists():
        return ""
    config = RowsConfig(data=str(rows_file(name, folder)), max_length=length)
    rows = calibration_rows(open_data(config, load(starting_model(name, folder))), COMPARED_ROWS, seed=1)
    return f"{output_distance(quantized, out / 'model.onnx', rows):.4f}"


def repeated(reference: Path, engine: Path, length: int, seed: int) -> list[float]:
    """Ratios at batch 1 and 8 in a fresh process; the order of the engines alternates with the seed."""
    request = json.dumps([str(reference), str(engine), length, seed])
    command = [sys.executable, "-m", "benchmarks.quantization", "--time", request]
    ratios: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return ratios


def time_pair(request: str) -> None:
    """Print the ratios of one repetition."""
    reference, engine, length, seed = json.loads(request)
    engines = [target("ort" if path.endswith(".onnx") else "openvino").load(Path(path)) for path in (reference, engine)]
    ratios = []
    for batch in (1, 8):
        feeds = random_feeds(load_graph(Path(reference)), batch, length, seed=seed)
        first, second = engines if seed % 2 == 0 else engines[::-1]
        speed = interleave(first, second, feeds, batch=batch, seq=length, seconds=6.0, seed=seed)
        ratios.append(speed.ratio if seed % 2 == 0 else 1 / speed.ratio)
    print(json.dumps(ratios))


def main() -> None:
    """Run the sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], default=[], help="default: sst2")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--repeats", type=int, default=5, help="processes that time each engine")
    parser.add_argument("--learn", action="store_true", help="learn the starting models only")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    parser.add_argument("--time", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.time:
        time_pair(args.time)
        return
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    for name in args.sets or ["sst2"]:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        measure(name, folder, args)


if __name__ == "__main__":
    main()
