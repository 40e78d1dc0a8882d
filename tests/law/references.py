"""Reference graphs of the families of `tests.zoo`, exported once in a test process."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor.units import Attention, find_groups, find_sites, keep_all
from graph_passes import BlockMask, Plan, load, save, shrink
from graph_passes.attention.gate_initializers import set_gates
from tests.shared_exports import shared_export
from tests.zoo import FAMILIES, GROUPED, VOCABULARY, WITH_MEMORY

_FOLDER = tempfile.TemporaryDirectory(prefix="references-")
MEMORY = 8
"""Positions of memory that the masks of a family with memory cover."""
HEADS = 4
"""Heads of a layer of most families."""


class Reference:
    """The reference graph of one family, with every gate open.

    Args:
        family: name in `tests.zoo`; the inputs include a memory if the family has one.
        opset: operator set.
        attention: form of attention.

    Attributes:
        groups: the groups of the model.
        sites: its attention sites.
        path: the graph.
        inputs: the inputs of the export.
        dense: number of elements of each weight of the model in the graph, shrunk by a plan that keeps every head.
    """

    def __init__(self, family: str, opset: int, attention: Attention) -> None:
        model, inputs = (FAMILIES | WITH_MEMORY)[family](0)
        self.groups = find_groups(model, inputs, attention=attention)
        self.sites = [group.site for group in self.groups if group.site is not None]
        self.path = Path(_FOLDER.name) / f"{family}-{opset}-{attention}.onnx"
        shared_export(model, keep_all(self.groups), inputs, self.path, opset=opset, attention=attention)
        self.inputs = {name: value.numpy() for name, value in inputs.items()}
        self._weights = frozenset(model.state_dict())
        self.dense = self.weights(shrink(load(self.path), keep_all(self.groups)).model)

    def weights(self, model: ir.Model) -> dict[str, int]:
        """Number of elements of each of the model's weights that a graph contains."""
        return weight_sizes(model, self._weights)

    def feeds(self) -> Iterator[dict[str, np.ndarray]]:
        """The inputs of the export, and inputs of other batch sizes and lengths, with padding in both; memories that
        are full, and half full. In the last inputs there are as many rows and positions as a layer has heads."""
        yield self.inputs
        rng = np.random.default_rng(1)
        yield self._feed(rng, 2, {"input_ids": 11, "decoder_input_ids": 4})
        yield self._feed(rng, HEADS, {"input_ids": HEADS, "decoder_input_ids": HEADS})

    def _feed(self, rng: np.random.Generator, batch: int, lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Inputs of some rows, of the lengths of source and target."""
        feeds: dict[str, np.ndarray] = {}
        for name, value in self.inputs.items():
            length = lengths.get(name.replace("attention_mask", "input_ids"))
            if name.startswith("memory_"):
                feeds[name] = rng.standard_normal((batch, value.shape[1] // 2, value.shape[2])).astype(value.dtype)
            elif length is None:
                feeds[name] = rng.standard_normal((batch, *value.shape[1:])).astype(value.dtype)
            elif "mask" in name:
                feeds[name] = np.ones((batch, length), value.dtype)
                feeds[name][-1, -2:] = 0
            else:
                feeds[name] = rng.integers(5, VOCABULARY - 1, (batch, length)).astype(value.dtype)
        if "input_ids" in feeds:
            feeds["input_ids"][:, 3] = VOCABULARY - 1  # CLIP reads its embedding at the end token.
        return feeds


@functools.cache
def reference(family: str, opset: int, attention: Attention) -> Reference:
    """The reference graph of a family; an export takes seconds."""
    return Reference(family, opset, attention)


@functools.cache
def grouped(opset: int, attention: Attention) -> Path:
    """The reference graph of the family with four query heads for each key/value head, with every gate open."""
    model, inputs = GROUPED(0)
    path = Path(_FOLDER.name) / f"grouped-{opset}-{attention}.onnx"
    plan = keep_all(find_groups(model, inputs, attention=attention))
    shared_export(model, plan, inputs, path, opset=opset, attention=attention)
    return path


def weight_sizes(model: ir.Model, names: Collection[str]) -> dict[str, int]:
    """Number of elements of each of these initializers that a graph contains."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items() if name in names}
    return {name: tensor.size for name, tensor in tensors.items() if tensor is not None}


@functools.cache
def masked_reference(family: str, attention: Attention, opset: int) -> tuple[Plan, Path]:
    """A plan with every head and random masks of every site but the last, and the reference graph with the masks."""
    model, inputs = FAMILIES[family](0)
    sites, rng = find_sites(model, inputs), np.random.default_rng(2)
    memory = MEMORY if family == "all_attention" else 0
    masks = {site.name: BlockMask(rng.random((site.heads, 4, 4 + memory // 8)) < 0.5, 8, memory) for site in sites[:-1]}
    masks[sites[0].name].kept[1] = False
    plan = keep_all(sites).masked(masks)
    path = Path(_FOLDER.name) / f"masked-{family}-{opset}-{attention}.onnx"
    shared_export(model, plan, inputs, path, opset=opset, attention=attention)
    return plan, path


def gated(path: Path, plan: Plan) -> Path:
    """A copy of a reference graph that computes with the gates of a plan."""
    model = load(path)
    set_gates(model.graph, plan)
    return write_graph(model, f"gated-{path.name}")


def write_graph(model: ir.Model, name: str) -> Path:
    """Write a graph to a file, which replaces an earlier graph of this name; return its path."""
    path = Path(_FOLDER.name) / name
    save(model, path)
    return path
