"""Measure time and peak memory of a model with block-sparse attention, a BERT of the shape of BERT-base.

    python -m benchmarks.long_texts                        # 384, 2048 and 4096 tokens, without 90% of the blocks
    python -m benchmarks.long_texts --length 2048 --share 0.5 --rows uniform --seconds 60
    python -m benchmarks.long_texts --engines              # ONNX Runtime and OpenVINO, fp32 and int8

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
from compressor.measure import interleave, macs, median_times
from compressor.quantization import quantize_graph
from compressor.targets import BuildOptions, Engine, Precision, target
from compressor.targets.trial_inputs import random_feeds
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


def model_and_plans(
    shape: str, length: int, options: argparse.Namespace
) -> tuple[Any, dict[str, Any], dict[str, Plan]]:
    """A model, a batch, and the plans with every block and with a share of them."""
    torch.manual_seed(options.seed)
    config = BertConfig(**SHAPES[shape], max_position_embeddings=max(512, length))
    model = BertForSequenceClassification(config).eval()
    ids = torch.randint(5, 30000, (2, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, 5:] = 0
    whole = keep_all(find_sites(model, inputs))
    return model, inputs, {"dense": whole, "block-sparse": whole.masked(masks(whole, length, options))}


def compare_engines(shape: str, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time both forms of attention on each engine in turn; return one row of the table for each engine and form."""
    model, inputs, plans = model_and_plans(shape, length, options)
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[tuple[str, str, str], Engine] = {}
        for form, plan in plans.items():
            reference, graph = (Path(folder) / f"{form}-{kind}.onnx" for kind in ("reference", "shrunk"))
            export_reference(model, plan, inputs, reference)
            save(shrink(load(reference), plan).model, graph)
            feeds = _unpadded(random_feeds(load(graph), options.batch, length, seed=options.seed))
            calibration = [
                _unpadded(random_feeds(load(graph), 1, 256, seed=int(seed))) for seed in rng.integers(99, size=8)
            ]
            quantized = quantize_graph(graph, calibration, Path(folder) / f"{form}-int8.onnx")
            sources: dict[tuple[str, Precision], Path] = {
                ("ort", "fp32"): graph,
                ("openvino", "fp32"): graph,
                ("openvino", "int8"): quantized.path,
            }
            for (runtime, precision), source in sources.items():
                out = Path(folder) / f"{form}-{runtime}-{precision}{target(runtime).suffixes[0]}"
                engine = target(runtime).build(source, out, precision=precision, threads=options.threads)
                engines[runtime, precision, form] = engine
                print(f"{length} {runtime} {precision} {form}: {engine.optimization}", file=sys.stderr, flush=True)
        medians = dict(zip(engines, median_times(list(engines.values()), feeds, options.seconds), strict=True))
    dense = "dense"
    lines = [
        {
            "tokens": length,
            "engine": f"{runtime} {precision}",
            "attention": form,
            "p50, ms": f"{1e3 * median:.0f}",
            "times ort fp32, dense": f"{medians['ort', 'fp32', dense] / median:.2f}",
            "times its own dense": f"{medians[runtime, precision, dense] / median:.2f}",
        }
        for (runtime, precision, form), median in medians.items()
    ]
    print(table(lines), file=sys.stderr, flush=True)
    return lines


def _unpadded(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**feeds, "attention_mask": np.ones_like(feeds["attention_mask"])}


def measure(shape: str, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Build and time the models of one length; return one row of the table for each form of dense attention."""
    model, inputs, plans = model_and_plans(shape, length, options)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        engines, graphs = {}, {}
        forms: tuple[tuple[str, Attention], ...] = (("block-sparse", "eager"), ("dense", "eager"), ("dense", "sdpa"))
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
        compressed = engines["block-sparse", "eager"]
        feeds = _unpadded(random_feeds(graphs["dense", "eager"], options.batch, length, seed=options.seed))
        counts = [macs(graphs[key], options.batch, length) for key in (("dense", "eager"), ("block-sparse", "eager"))]
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
    parser.add_argument("--engines", action="store_true", help="compare runtimes and precisions, without the kernel")
    options = parser.parse_args()
    rows_of = compare_engines if options.engines else measure
    lines = [line for length in options.length for line in rows_of(options.shape, length, options)]
    print(f"command: python -m benchmarks.long_texts {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {machine('onnxruntime', 'openvino', 'torch', 'transformers')}; {options.threads} threads")
    print(
        f"{options.shape}, batch {options.batch}, block {options.block}, {options.share:.0%} of the blocks gone,"
        f" {options.rows} rows, block-sparse by {'the compiled kernel' if options.kernel else 'the function'}."
        f"{'' if options.engines else ' Intervals are 95%.'}\n"
    )
    print(table(lines))


if __name__ == "__main__":
    main()
