"""Errors of an All-attention stream in ONNX Runtime against PyTorch, and of a text in segments against the whole text.

    python -m benchmarks.all_attention_stream             # the paper's width, heads and vectors in 2 layers
    python -m benchmarks.all_attention_stream --layers 16

Weights are random; models are dense or without half of their heads (`even`: of every layer, `uneven`: a random half).
The text is streamed with a memory of one segment through the graph and through PyTorch, where dropped heads are gated;
then it is read with a memory of the whole text, both whole and in segments, through the graph. The difference with a
memory of one segment shows that memory has an effect.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.all_attention_speed import plans
from benchmarks.machine import machine
from benchmarks.speed import table
from compressor.export import export_reference
from compressor.models import AllAttentionConfig, AllAttentionForCausalLM
from compressor.segment_memory import memory_names
from compressor.targets import target
from compressor.targets.relative_error import relative_error
from compressor.targets.segment_stream import Stream
from compressor.units import find_sites, gated
from graph_passes import Plan, load, save, shrink

ALLOWED = 1e-4
"""Maximum relative error."""

State = list[np.ndarray]
"""Logits `[batch, segment, vocabulary]` of a segment, then the memory `[batch, memory, hidden]` of each layer."""


def model_of(layers: int, memory: int, seed: int) -> AllAttentionForCausalLM:
    """A model of the width, heads and persistent vectors of the paper, with the same weights for any memory.

    Weights are large enough for the layers to determine the logits, as in a trained model.
    """
    torch.manual_seed(seed)
    config = AllAttentionConfig(vocab_size=1000, num_hidden_layers=layers, memory_length=memory, initializer_range=0.1)
    model = AllAttentionForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def stream_of(model: AllAttentionForCausalLM, plan: Plan, folder: Path) -> Stream:
    """A stream through the graph of a model, shrunk by a plan."""
    ids = torch.ones(2, 5, dtype=torch.int64)
    names = memory_names(model.config.num_hidden_layers)
    memories = {name: torch.randn(2, 7, model.config.hidden_size) for name in names}
    reference, graph = folder / "reference.onnx", folder / "shrunk.onnx"
    export_reference(model, plan, {"input_ids": ids, **memories}, reference)
    save(shrink(load(reference), plan).model, graph)
    return Stream(target("ort")(graph, folder / "engine.onnx", provider="cpu", threads=1), graph)


def through_graph(stream: Stream, text: np.ndarray, segment: int) -> Iterator[State]:
    """The state after each segment of a text `[batch, tokens]`, computed by the graph."""
    stream.memories = ()
    for ids in np.split(text, range(segment, text.shape[1], segment), axis=1):
        yield [stream.read(ids), *stream.memories]


def through_pytorch(model: AllAttentionForCausalLM, text: np.ndarray, segment: int) -> Iterator[State]:
    """The state after each segment of a text `[batch, tokens]`, computed by PyTorch."""
    memories: tuple[torch.Tensor, ...] | None = None
    for ids in torch.from_numpy(text).split(segment, dim=1):
        with torch.no_grad():
            outputs = model(ids, memories=memories)
        memories = outputs.memories
        yield [value.numpy() for value in (outputs.logits, *outputs.memories)]


def largest_errors(expected: Iterable[State], states: Iterable[State]) -> tuple[float, float]:
    """Largest relative error of logits, and of memories."""
    errors = [
        [relative_error(reference, value, {}) for reference, value in zip(references, values, strict=True)]
        for references, values in zip(expected, states, strict=True)
    ]
    return max(logits for logits, *_ in errors), max(max(memories) for _, *memories in errors)


def joined(states: Iterable[State]) -> State:
    """The logits of all segments as one, with the memories of the last."""
    every = list(states)
    return [np.concatenate([logits for logits, *_ in every], axis=1), *every[-1][1:]]


def measure(options: argparse.Namespace) -> list[dict[str, str]]:
    """Stream the text through every model; return the rows of the table."""
    tokens = options.segment * options.segments
    text = np.random.default_rng(options.seed).integers(1000, size=(1, tokens))
    forgets, remembers = (model_of(options.layers, memory, options.seed) for memory in (options.segment, tokens))
    sites = find_sites(forgets, {"input_ids": torch.from_numpy(text[:, :8])})
    rows = []
    for name, plan in plans(sites, options.seed).items():
        with tempfile.TemporaryDirectory() as folder:
            stream = stream_of(forgets, plan, Path(folder))
            short = list(through_graph(stream, text, options.segment))
        with gated(forgets, plan):
            streamed = largest_errors(through_pytorch(forgets, text, options.segment), short)
        with tempfile.TemporaryDirectory() as folder:
            stream = stream_of(remembers, plan, Path(folder))
            whole = list(through_graph(stream, text, tokens))
            parts = largest_errors(whole, [joined(through_graph(stream, text, options.segment))])
        comparisons = {
            "ONNX Runtime and PyTorch": streamed,
            "segments that remember all, and whole": parts,
            "segments that remember one, and whole": (relative_error(whole[0][0], joined(short)[0], {}), None),
        }
        for compared, (logits, memories) in comparisons.items():
            rows.append(
                {
                    "plan": name,
                    "heads": f"{plan.heads_kept}/{plan.heads}",
                    "compared": compared,
                    "logits": f"{logits:.1e}",
                    "memories": "" if memories is None else f"{memories:.1e}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--segment", type=int, default=192, help="tokens of a segment")
    parser.add_argument("--segments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = measure(options)
    print(f"command: python -m benchmarks.all_attention_stream {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {machine('onnxruntime', 'onnxscript', 'torch', 'transformers')}")
    print(
        f"largest relative error = largest difference / largest value, of any of {options.segments} segments of"
        f" {options.segment} tokens; {ALLOWED:g} is allowed.\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
