"""Times of a decoder with every unit and without a third of its heads and neurons, in fp32 and with rounded weights.

    python -m benchmarks.decoders --layers 30 --threads 2

The model is a Llama of the shape of 135 million parameters (width 576, 9 query and 3 key/value heads of 64) with random
weights: times do not depend on their values. It is exported with caches, shrunk, and built for ONNX Runtime. Each
engine is timed in turn with that of every unit in fp32. The export takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compressor.generation.bench import bench_generation
from compressor.generation.export import export_generation
from compressor.generation.weights import Rounding
from compressor.generation.workload import Workload
from compressor.progress import NullListener
from compressor.targets import WEIGHT_BITS, target
from compressor.targets.caches import DECODER
from compressor.targets.onnxruntime.sessions import engine_of
from compressor.units import find_groups, keep_all
from graph_passes import load, save
from graph_passes.attention.gate_initializers import set_gates
from graph_passes.shrink import shrink_parts


def main() -> None:
    """Print a row for each engine and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    sizes |= {"num_key_value_heads": 3, "vocab_size": 49152}
    sizes |= {"num_hidden_layers": options.layers, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    whole = keep_all(find_groups(model, {"input_ids": torch.arange(32).reshape(2, 16) + 5}))
    kept = {"heads": range(6), "neurons": range(1024)}
    pruned = whole.replace_groups(replace(group, kept=tuple(kept[group.type]), scale=()) for group in whole.groups)
    workload = Workload(tuple(itertools.product(options.batch, options.prompt_tokens)), options.new_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        gated, dense, small = (Path(scratch) / name for name in ("gated", "dense", "small"))
        for folder in (gated, dense, small):
            folder.mkdir()
        files = export_generation(model, whole, gated)
        for folder, plan in ((dense, whole), (small, pruned)):
            graphs = {name: load(gated / name) for name in files}
            for graph in graphs.values():
                set_gates(graph.graph, plan)
            for name, part in shrink_parts(graphs, plan).items():
                save(part.model, folder / name)
            target("ort").build_sessions(folder, files, workload.contexts, options.threads)
        others = [small]
        for folder, precision in itertools.product((dense, small), WEIGHT_BITS):
            others.append(folder.with_name(f"{folder.name}-{precision}"))
            others[-1].mkdir()
            rounded = Rounding(precision).apply(load(engine_of(folder / DECODER)))
            save(rounded, others[-1] / DECODER)
        for other in others:
            rows = bench_generation(
                (dense, other),
                workload,
                threads=options.threads,
                seconds=options.seconds,
                listener=NullListener(),
            )
            for row in rows:
                size = f"batch {row.batch}, {row.prompt_tokens} tokens"
                times = f"prompt {row.prompt_ms:.1f} ms, token {row.token_ms:.2f} ms"
                print(f"{row.folder.name}: {size}: {times}, cache {row.cache_bytes:,} bytes a token", flush=True)


if __name__ == "__main__":
    main()
