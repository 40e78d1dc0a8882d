"""Quality and speed of small trained models that generate, at the budgets that users set.

    python -m benchmarks.language_model               # trains the Llama: 15 minutes on one core
    python -m benchmarks.generation_quality llama     # --speedup 1.5, plain and distilled; weights of 8 and 4 bits
    python -m benchmarks.translation --size small     # trains the Marian: 13 minutes on one core
    python -m benchmarks.generation_quality marian    # the same at --speedup 2

Each row is a run of `compress` with its defaults, in a folder under `--out`; finished runs are not repeated. The run
that distills follows the plan of the one before, so that both have the same units; with `int8w-plain` the budget holds
with weights of 8 bits. The metric is that of the engines with caches on test rows, on which nothing is chosen: half of
the validation text of WikiText-2, or the test rows of Multi30k. Times are those of one text, each engine in turn with
that of the whole model in fp32.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.language_model import DATA
from benchmarks.machine import machine
from benchmarks.quantization import run
from benchmarks.speed import table
from compressor.config.run import Recipe
from compressor.results import Phase, Report
from compressor.targets import WEIGHT_BITS


@dataclass(frozen=True)
class Case:
    """A model and the budget that it is compressed to.

    Attributes:
        model: folder of the model.
        rows: file of training rows, which may be compressed.
        eval_rows: file of evaluation and test rows; None: `rows` has splits.
        speedup: the budget.
        fields: further fields of the recipes.
    """

    model: Path
    rows: Path
    speedup: float
    eval_rows: Path | None = None
    fields: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case(
        Path("build/language_model/model"),
        DATA / "wikitext2_train.txt.xz",
        1.5,
        DATA / "wikitext2_valid.txt.xz",
    ),
    "marian": Case(
        Path("build/translation/small/model"),
        DATA / "multi30k_deen.tsv.xz",
        2.0,
        fields={"task": "translation", "text_columns": ("de", "en"), "max_length": 96},
    ),
}


def row_of(name: str, report: Report) -> dict[str, str]:
    """A row of the table."""
    score, generation = report.scores[0], report.generation
    assert generation is not None
    speeds = {row.phase: row.speed for row in generation.speeds if row.speed.batch == 1}
    is_share = not score.higher_is_better  # a perplexity
    scale, unit = (100 / score.dense, "%") if is_share else (1.0, "")
    low, difference, high = (scale * value for value in (score.low, score.difference, score.high))

    def time(phase: Phase) -> str:
        speed = speeds[phase]
        return f"{speed.compressed.p50:.3g} ms ({speed.ratio:.2f}x)"

    return {
        "run": name,
        f"{score.metric} ({score.rows} test rows)": f"{score.dense:.2f} -> {score.compressed:.2f}",
        "difference (95%)": f"{difference:+.2f}{unit} ({low:+.2f} to {high:+.2f})",
        "token": time("token"),
        "prompt": time("prompt"),
        "request": time("request"),
        "cache, bytes a token": f"{generation.dense_cache:,} -> {generation.compressed_cache:,}",
        "heads": f"{report.plan.heads_kept} of {report.plan.heads}",
        "neurons": f"{report.plan.neurons_kept:,} of {report.plan.neurons:,}",
        "minutes": f"{sum(report.seconds.values()) / 60:.1f}",
    }


def main() -> None:
    """Print the table of a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--model", type=Path, help="folder of the model, in place of that of the case")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--speedup", type=float, help="budget, in place of that of the case")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of the distillation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", nargs="+", help="names of the rows to print, of the first column; default: all")
    parser.add_argument("--out", type=Path, default=Path("build/generation_quality"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime')}; {args.threads} threads", flush=True)
    case, folder = CASES[args.case], args.out / args.case
    names = {"data": case.rows, "eval_data": case.eval_rows}
    files = {name: str(args.data / path.name) for name, path in names.items() if path is not None}
    common = {"model": args.model or case.model, **files, **case.fields, "threads": args.threads, "batch": (1,)}
    budget = {"speedup": args.speedup or case.speedup}
    runs: dict[str, dict[str, Any]] = {
        "plain": budget,
        "distilled": {"plan": folder / "plain" / "plan.json", "distill": True, "minutes": args.minutes},
        **{precision: {"keep": "100%", "precision": precision} for precision in WEIGHT_BITS},
        **{f"{precision}-plain": {**budget, "precision": precision} for precision in WEIGHT_BITS},
    }
    rows = []
    for name in args.runs or runs:
        report = run(Recipe(**common, **runs[name], out=folder / name))
        rows.append(row_of(name, report))
        print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
