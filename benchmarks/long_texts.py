"""Measure time and peak memory of a model with block-sparse attention, a BERT of the shape of BERT-base.

    python -m benchmarks.long_texts                        # 384, 2048 and 4096 tokens, without 90% of the blocks
    python -m benchmarks.long_texts --length 2048 --share 0.5 --rows uniform --seconds 60

Weights and masks are random, which does not change the time, except for the distribution of blocks over rows
(`--rows`). Dense and compressed models have the same export, passes and build; dense models in two forms of attention:
`eager`, which ONNX Runtime fuses into its `Attention` of whole maps, and `sdpa`, with the operators of its export.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.block_sparse import ragged, uniform
from benchmarks.machine import machine
from benchmarks.speed import SHAPES, table
from compressor.export import export_reference
from compressor.measure import interleave, macs
from compressor.targets import BuildOptions, target
from compressor.targets.random_inputs import random_feeds
from compressor.units import find_sites, keep_all
from compressor.units.hook import Attention
from graph_passes import BlockMask, Plan, load, save, shrink

GOALS = {384: 1.0, 2048: 1.25, 4096: 1.6}
"""Tokens -> minimum speedup without 90% of the blocks."""


def masks(plan: Plan, length: int, options: argparse.Namespace) -> dict[str, BlockMask]:
    """A random mask for each site."""
    draw = ragged if options.rows == "ragged" else uniform
    rng, blocks = np.random.default_rng(options.seed), -(-length // options.block)
    return {
        site.name: BlockMask(draw(site.heads, blocks, 1 - options.share, rng), options.block) for site in plan.sites
    }


def measure(shape: str, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Build and time the models of one length; return one row of the table for each form of dense attention."""
    torch.manual_seed(options.seed)
    config = BertConfig(**SHAPES[shape], max_position_embeddings=max(512, length))
    model = BertForSequenceClassification(config).eval()
    ids = torch.randint(5, 30000, (2, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, 5:] = 0
    whole = keep_all(find_sites(model, inputs))
    plans = {"dense": whole, "compressed": whole.masked(masks(whole, length, options))}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        engines, graphs = {}, {}
        forms: tuple[tuple[str, Attention], ...] = (("compressed", "eager"), ("dense", "eager"), ("dense", "sdpa"))
        for name, form in forms:
            reference, graph = (Path(folder) / f"{name}-{form}-{kind}.onnx" for kind in ("reference", "shrunk"))
            export_reference(model, plans[name], inputs, reference, attention=form)
            save(shrink(load(reference), plans[name]).model, graph)
            graphs[name, form] = load(graph)
            engines[name, form] = target("ort")(
                graph,
                Path(folder) / f"{name}-{form}.onnx",
                provider="cpu",
                threads=options.threads,
                options=BuildOptions(kernel=options.kernel),
            )
            print(f"{length} {name} {form}: {engines[name, form].optimization}", file=sys.stderr)
        compressed = engines["compressed", "eager"]
        feeds = random_feeds(graphs["dense", "eager"], options.batch, length, seed=options.seed)
        feeds["attention_mask"] = np.ones_like(feeds["attention_mask"])
        counts = [macs(graphs[key], options.batch, length) for key in (("dense", "eager"), ("compressed", "eager"))]
        peak = compressed.memory(feeds) or 0
        for name, form in forms[1:]:
            dense = engines[name, form]
            speed = interleave(
                dense, compressed, feeds, batch=options.batch, seq=length, seconds=options.seconds, seed=options.seed
            )
            dense_peak = dense.memory(feeds) or 0
            lines.append(
                {
                    "tokens": length,
                    "dense attention": form,
                    "dense p50, ms": f"{speed.dense.p50:.0f}",
                    "block-sparse p50, ms": f"{speed.compressed.p50:.0f}",
                    "times faster": f"{speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})",
                    "goal": GOALS.get(length, ""),
                    "peak memory, MiB": f"{dense_peak / 2**20:.0f} to {peak / 2**20:.0f}",
                    "less": f"{100 * (1 - peak / dense_peak):.0f}%" if dense_peak else "",
                    "GMACs": " to ".join(f"{count / 1e9:.1f}" if count else "?" for count in counts),
                    "fused": f"{dense.fused}/{dense.attentions}, {compressed.fused}/{compressed.attentions}",
                }
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="base")
    parser.add_argument("--length", nargs="+", type=int, default=[384, 2048, 4096])
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.9, help="share of the blocks that are dropped")
    parser.add_argument("--rows", choices=("uniform", "ragged"), default="ragged")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernel", type=Path, help="library of compress kernel; default: the function in plain ONNX")
    parser.add_argument("--seconds", type=float, default=30.0, help="approximate time to measure each line")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = [line for length in options.length for line in measure(options.shape, length, options)]
    print(f"command: python -m benchmarks.long_texts {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {machine('onnxruntime', 'onnxscript', 'torch', 'transformers')}; {options.threads} threads")
    print(
        f"{options.shape}, batch {options.batch}, block {options.block}, {options.share:.0%} of the blocks gone,"
        f" {options.rows} rows, fp32, block-sparse by {'the compiled kernel' if options.kernel else 'the function'}."
        " Intervals are 95%.\n"
    )
    print(table(lines))


if __name__ == "__main__":
    main()
