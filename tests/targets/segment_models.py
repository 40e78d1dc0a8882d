"""Small language models that read segment by segment, their graphs and their engines."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.engines.prove import Case, make_cases
from compressor.model_folder import ModelFolder, example_inputs
from compressor.models import (
    AllAttentionConfig,
    AllAttentionForCausalLM,
    SegmentForCausalLM,
    TransformerXLConfig,
    TransformerXLForCausalLM,
)
from compressor.targets import Engine, target
from compressor.targets.relative_error import relative_error
from compressor.targets.segment_stream import Stream
from compressor.units import Site, find_sites, keep_all
from graph_passes import Plan, Shrunk, load, save, shrink
from graph_passes.attention.gate_initializers import set_gates
from tests.shared_exports import shared_export

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "memory_length": 6,
    "max_position_embeddings": 40,
}
FAMILIES = ("all_attention", "transformer_xl")
TOLERANCE = 1e-4
"""Largest relative error between PyTorch and an engine."""
_FOLDER = tempfile.TemporaryDirectory()


def segment_model(family: str, **sizes: Any) -> SegmentForCausalLM:
    """A model of a family with random weights and biases."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: SegmentForCausalLM
        if family == "all_attention":
            model = AllAttentionForCausalLM(AllAttentionConfig(**{**SIZES, "num_persistent": 5, **sizes}))
        else:
            model = TransformerXLForCausalLM(TransformerXLConfig(**{**SIZES, **sizes}))
        for name, parameter in model.eval().named_parameters():
            if parameter.dim() > 1 and "persistent" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def token_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids `[batch, length]`."""
    return torch.randint(SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def head_parameters(model: SegmentForCausalLM) -> int:
    """Number of parameters of one head."""
    config = model.config
    return int(config.head_dim or 0) * (5 * config.hidden_size + 2 + 2 * getattr(config, "num_persistent", 0))


def plan_of(sites: Sequence[Site], kept: Sequence[tuple[int, ...]], rng: np.random.Generator | None = None) -> Plan:
    """A plan that keeps given heads of each site, with random scales if a generator is given."""
    scales = [tuple(rng.uniform(0.5, 1.5, len(heads))) if rng else () for heads in kept]
    entries = zip(keep_all(sites).sites, kept, scales, strict=True)
    return Plan(sites=tuple(replace(site, kept=heads, scale=scale) for site, heads, scale in entries))


@dataclass(frozen=True)
class SegmentGraph:
    """A model and its reference graph.

    Attributes:
        model: the model.
        sites: its attentions.
        reference: the graph with every gate open.
        cases: inputs of proofs.
    """

    model: SegmentForCausalLM
    sites: list[Site]
    reference: Path
    cases: Sequence[Case]

    def shrunk(self, plan: Plan) -> Shrunk:
        """The graph without the heads that a plan drops."""
        return shrink(load(self.reference), plan)

    def gated(self, plan: Plan, path: Path) -> Path:
        """The graph with the gates of a plan, as a file."""
        model = load(self.reference)
        set_gates(model.graph, plan)
        save(model, path)
        return path


@functools.cache
def exported_model(family: str) -> SegmentGraph:
    """A model of a family, exported with every gate open, once in a test process."""
    folder = Path(_FOLDER.name) / family
    folder.mkdir()
    model = segment_model(family)
    source = ModelFolder(Path("model"), model, None, model.config, "sha256:1", "causal-lm", model.config.model_type)
    inputs = example_inputs(source, 2, 8)
    sites, path = find_sites(model, inputs), folder / "reference.onnx"
    attention: Any = "sdpa" if family == "transformer_xl" else "eager"
    shared_export(model, keep_all(sites), inputs, path, attention=attention)
    cases = make_cases(lambda *size: example_inputs(source, *size), maximum_length=40)
    return SegmentGraph(model, sites, path, cases)


def stream_error(stream: Stream, model: SegmentForCausalLM, lengths: Sequence[int]) -> float:
    """The largest error of logits and memories against PyTorch, over segments of three texts."""
    memories: tuple[Tensor, ...] | None = None
    errors = []
    with torch.no_grad():
        for step, length in enumerate(lengths):
            segment = token_ids(3, length, step) % model.config.vocab_size
            outputs: Any = model(segment, memories=memories)
            memories = outputs.memories
            expected = [tensor.numpy() for tensor in (outputs.logits, *outputs.memories)]
            read = [stream.read(segment.numpy()), *stream.memories]
            errors += [relative_error(*pair, {}) for pair in zip(expected, read, strict=True)]
    return max(errors)


def build(shrunk: Shrunk, folder: Path) -> tuple[Engine, Path]:
    """An engine of a shrunk graph, and the graph's file: the arguments of `Stream`."""
    graph = folder / "model.onnx"
    save(shrunk.model, graph)
    return target("ort")(graph, folder / "engine.onnx", provider="cpu", threads=1), graph
