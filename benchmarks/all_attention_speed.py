"""Time an All-attention Transformer with half of its heads in ONNX Runtime on the CPU, and measure its memory.

    python -m benchmarks.all_attention_speed              # the paper's stack: 16 layers, width 512, 8 heads, N 2048
    python -m benchmarks.all_attention_speed --layers 2 --seconds 5

The graph reaches from the embeddings to the last norm, over a segment of 192 positions with as many in memory;
embedding and logits are left out, since pruning heads does not change them. Weights are random, which does not change
the time. `even` drops half of the heads of every layer, `uneven` a random half of all heads. Dense and compressed
models have the same export, passes and build.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from benchmarks.machine import machine
from benchmarks.speed import table
from compressor.export import export_reference
from compressor.measure import interleave, macs
from compressor.models import AllAttentionConfig, AllAttentionModel
from compressor.segment_memory import memory_names
from compressor.targets import Engine, target
from compressor.targets.trial_inputs import random_feeds
from compressor.units import Site, find_sites, keep_all, keep_only
from graph_passes import Plan, load, save, shrink

FASTER, SMALLER = 1.8, 0.55
"""Goals: minimum speedup, and maximum share of the dense weights in bytes."""


def plans(sites: list[Site], seed: int) -> dict[str, Plan]:
    """Plans that keep every head, half of each layer, and a random half of all."""
    rng = np.random.default_rng(seed)
    even = [(site.name, int(head)) for site in sites for head in rng.permutation(site.heads)[: site.heads // 2]]
    every = [(site.name, head) for site in sites for head in range(site.heads)]
    uneven = [every[index] for index in rng.permutation(len(every))[: len(every) // 2]]
    return {
        "dense": keep_all(sites),
        "even": keep_only(sites, dict.fromkeys(even, 1.0)),
        "uneven": keep_only(sites, dict.fromkeys(uneven, 1.0)),
    }


def stack(layers: int, memory: int, seed: int) -> tuple[AllAttentionModel, dict[str, torch.Tensor]]:
    """The layers of the paper, and inputs with memories for them."""
    torch.manual_seed(seed)
    config = AllAttentionConfig(vocab_size=2, num_hidden_layers=layers, memory_length=memory)
    model = AllAttentionModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # the exporter would merge two biases of zeros
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = {"inputs_embeds": torch.randn(2, 5, config.hidden_size)}
    memories = {name: torch.randn(2, 7, config.hidden_size) for name in memory_names(layers)}
    return model, {**inputs, **memories}


def weight_bytes(path: Path) -> int:
    """Bytes of the initializers of a graph."""
    tensors = (value.const_value for value in ir.load(path).graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Build and time the models; return the rows of the table."""
    model, inputs = stack(options.layers, options.seq, options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[str, Engine] = {}
        facts: dict[str, dict[str, Any]] = {}
        named_plans = plans(find_sites(model, inputs), options.seed)
        for name, plan in named_plans.items():
            reference, graph, engine = (
                Path(folder) / f"{name}.{kind}.onnx" for kind in ("reference", "shrunk", "engine")
            )
            export_reference(model, plan, inputs, reference, attention=options.attention, opset=options.opset)
            save(shrink(load(reference), plan).model, graph)
            reference.unlink()
            Path(f"{reference}.data").unlink()
            engines[name] = target("ort")(graph, engine, provider="cpu", threads=options.threads)
            feeds = random_feeds(load(graph), 1, options.seq, seed=options.seed)
            facts[name] = {
                "macs": macs(load(graph), 1, options.seq),
                "weights": weight_bytes(engine),
                "peak": engines[name].memory(feeds),
            }
            print(f"{name}: {engines[name].optimization}", file=sys.stderr)
        graph = Path(folder) / "dense.shrunk.onnx"
        feeds = random_feeds(load(graph), 1, options.seq, seed=options.seed)
        dense = facts["dense"]
        for name, plan in named_plans.items():
            speed = interleave(
                engines["dense"],
                engines[name],
                feeds,
                batch=1,
                seq=options.seq,
                seconds=options.seconds,
                seed=options.seed,
            )
            rows.append(
                {
                    "plan": "dense twice" if name == "dense" else name,
                    "heads": f"{plan.heads_kept}/{plan.heads}",
                    "a layer": " ".join(str(len(site.kept)) for site in plan.sites),
                    "dense p50, ms": f"{speed.dense.p50:.1f}",
                    "compressed p50, ms": f"{speed.compressed.p50:.1f}",
                    "times faster": f"{speed.ratio:.3f} ({speed.low:.3f} to {speed.high:.3f})",
                    "MACs left": f"{100 * facts[name]['macs'] / dense['macs']:.1f}%",
                    "weights, MB": f"{facts[name]['weights'] / 1e6:.1f}",
                    "weights left": f"{facts[name]['weights'] / dense['weights']:.3f}",
                    "peak memory left": f"{facts[name]['peak'] / dense['peak']:.3f}"
                    if dense["peak"]
                    else "not measured",
                    "fused": f"{engines[name].fused}/{engines[name].attentions}",
                    "void": speed.void or "",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seq", type=int, default=192, help="positions of the segment and of the memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--opset", type=int, choices=(18, 23), default=18)
    parser.add_argument("--seconds", type=float, default=60.0, help="approximate time to measure each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    rows = measure(options)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"command: python -m benchmarks.all_attention_speed {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {machine('onnxruntime', 'onnxscript', 'torch', 'transformers')}; {options.threads} threads")
    print(
        f"times faster = dense p50 / compressed p50, batch 1, {options.seq} positions and as many in memory; intervals "
        f"are 95%. Goals: {FASTER} times at least, {SMALLER} of the weights at most.\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
