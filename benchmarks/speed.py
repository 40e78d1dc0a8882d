"""Time pruned models on ONNX Runtime: share of time saved over share of multiply-accumulates removed.

    python -m benchmarks.speed                      # MiniLM and BERT-base shapes, batch 1 and 8, 128 tokens
    python -m benchmarks.speed --shape minilm --seconds 60

Weights are random, which does not change the time. Heads are drawn over the whole model, so that layers keep different
numbers of heads and some keep none. Dense and compressed models have the same export, passes and build.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.gpu_goals import saved_share
from benchmarks.machine import machine
from compressor.export import export_reference
from compressor.measure import interleave, macs
from compressor.results import Speed
from compressor.targets import Engine, target
from compressor.targets.trial_inputs import random_feeds
from compressor.units import find_sites
from graph_passes import Plan, SitePlan, load, save, shrink

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
KEPT = {"minilm": (36, 6), "base": (72, 12)}
FORMULA = "(1 - p50 compressed / p50 dense) / (1 - MACs compressed / MACs dense)"
GOAL = 0.85
"""Minimum value of `FORMULA`."""


def plans(shape: str, seed: int) -> tuple[BertForSequenceClassification, dict[str, torch.Tensor], dict[int, Plan]]:
    """A model, a batch, and number of kept heads -> plan, with every head first.

    Args:
        shape: key of `SHAPES`.
        seed: seed of the weights, the batch and the heads.
    """
    torch.manual_seed(seed)
    model = BertForSequenceClassification(BertConfig(**SHAPES[shape])).eval()
    ids = torch.randint(5, 30000, (2, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, 5:] = 0
    sites = find_sites(model, inputs)
    heads = [(site, head) for site in range(len(sites)) for head in range(sites[site].heads)]
    order = np.random.default_rng(seed).permutation(len(heads))
    plan_of = {}
    for kept in (len(heads), *KEPT[shape]):
        chosen = {heads[position] for position in order[:kept]}
        entries = [
            SitePlan(
                site.name,
                site.kind,
                site.heads,
                site.kv_heads,
                site.head_dim,
                tuple(head for head in range(site.heads) if (index, head) in chosen),
            )
            for index, site in enumerate(sites)
        ]
        plan_of[kept] = Plan(sites=tuple(entries))
    return model, inputs, plan_of


def row(
    shape: str, plan: Plan, speed: Speed, engines: tuple[Engine, Engine], counts: tuple[int, int]
) -> dict[str, Any]:
    """One row of the table.

    Args:
        shape: key of `SHAPES`.
        plan: plan of the compressed engine.
        speed: times of both engines.
        engines: dense and compressed engine.
        counts: multiply-accumulates of both graphs.
    """
    dense, compressed = engines
    is_same = dense is compressed
    return {
        "model": shape,
        "heads": "dense twice" if is_same else f"{plan.heads_kept}/{plan.heads}",
        "a layer": " ".join(str(len(site.kept)) for site in plan.sites),
        "batch": speed.batch,
        "dense p50, ms": f"{speed.dense.p50:.2f}",
        "compressed p50, ms": f"{speed.compressed.p50:.2f}",
        "times faster": f"{speed.ratio:.3f} ({speed.low:.3f} to {speed.high:.3f})",
        "time saved": f"{100 * (1 - 1 / speed.ratio):.1f}%",
        "MACs removed": f"{100 * (1 - counts[1] / counts[0]):.1f}%",
        "share": "" if is_same else f"{saved_share(speed, *counts):.3f}",
        "fused": f"{dense.fused}/{dense.attentions}, {compressed.fused}/{compressed.attentions}",
        "void": speed.void or "",
    }


def measure(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row of one shape."""
    model, inputs, plan_of = plans(shape, options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[int, Engine] = {}
        graphs = {}
        for kept, plan in plan_of.items():
            reference, graph = (Path(folder) / f"{kept}-{name}.onnx" for name in ("reference", "shrunk"))
            export_reference(model, plan, inputs, reference, attention=options.attention)
            save(shrink(load(reference), plan).model, graph)
            graphs[kept] = load(graph)
            engines[kept] = target("ort")(graph, Path(folder) / f"{kept}.onnx", provider="cpu", threads=options.threads)
            print(f"{shape} {kept}: {engines[kept].optimization}", file=sys.stderr)
        every = next(iter(plan_of))
        for batch in options.batch:
            feeds = random_feeds(graphs[every], batch, options.seq, seed=options.seed)
            for kept, plan in plan_of.items():
                pair = (engines[every], engines[kept])
                speed = interleave(
                    *pair, feeds, batch=batch, seq=options.seq, seconds=options.seconds, seed=options.seed
                )
                counts = [macs(graphs[heads], batch, options.seq) for heads in (every, kept)]
                assert counts[0] is not None
                assert counts[1] is not None
                rows.append(row(shape, plan, speed, pair, (counts[0], counts[1])))
    return rows


def median_and_range(values: Sequence[float], unit: str = "") -> str:
    """Median with its unit, smallest and largest value: `1.50x (1.40 to 1.70)`."""
    return f"{np.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--seconds", type=float, default=60.0, help="approximate duration of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    rows = [row for shape in options.shape for row in measure(shape, options)]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"command: python -m benchmarks.speed {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {machine('onnxruntime', 'onnxscript', 'torch', 'transformers')}; {options.threads} threads")
    print(f"share = {FORMULA}, {options.seq} tokens; the goal is {GOAL} at least. Intervals are 95%.\n")
    print(table(rows))


if __name__ == "__main__":
    main()
