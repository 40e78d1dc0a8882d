"""Graphs for the tests of building, proving and measuring: from ONNX text, and of pruned models.

PyTorch is imported only to export a model: most users of this module only need ONNX text.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir

from graph_passes import BlockMask, Plan, load, save, shrink


def parsed(body: str, inputs: str, outputs: str, weights: str = "", opset: int = 18) -> ir.Model:
    """A graph from ONNX text.

    Args:
        body: the nodes.
        inputs: names with types.
        outputs: names with types.
        weights: names with types, and with values unless they are random.
        opset: operator set.
    """
    imports = f'"" : {opset}, "com.microsoft" : 1'
    text = f"<ir_version: 10, opset_import: [{imports}]> g ({inputs}) => ({outputs}) <{weights}> {{ {body} }}"
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for info in proto.graph.value_info:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        content = rng.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(content, info.name))
    del proto.graph.value_info[:]
    return ir.from_proto(proto)


class Pruned:
    """A model of a family with a random plan, exported and shrunk.

    Args:
        family: of `tests.zoo`.
        seed: of the plan.

    Attributes:
        model: the model.
        inputs: one batch.
        plan: heads and neurons to keep.
        reference: the exported graph, with every unit.
        shrunk: the graph with the units that the plan keeps.
    """

    def __init__(self, family: str, seed: int = 1) -> None:
        from compressor.units import find_groups
        from tests.random_plans import random_groups
        from tests.shared_exports import shared_export
        from tests.zoo import FAMILIES

        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.model, inputs = FAMILIES[family](0)
        self.inputs: dict[str, np.ndarray] = {name: value.numpy() for name, value in inputs.items()}
        self.plan: Plan = random_groups(find_groups(self.model, inputs), np.random.default_rng(seed))
        self.reference, self.shrunk = folder / f"{family}-reference.onnx", folder / f"{family}-shrunk.onnx"
        shared_export(self.model, self.plan, inputs, self.reference)
        save(shrink(load(self.reference), self.plan).model, self.shrunk)

    @property
    def attentions(self) -> int:
        """Number of sites that keep a head."""
        return sum(bool(site.kept) for site in self.plan.sites)


@functools.cache
def pruned(family: str) -> Pruned:
    """A pruned model of a family, exported once in a test process."""
    return Pruned(family)


class Masked:
    """BERT with random masks of blocks of 8 positions at every site but the last, exported and shrunk.

    Attributes:
        plan: with the masks; it keeps every head.
        reference: the exported graph, with the masks as biases.
        shrunk: the graph with block-sparse attention.
    """

    def __init__(self) -> None:
        from compressor.units import find_sites, keep_all
        from tests.shared_exports import shared_export
        from tests.zoo import FAMILIES

        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        model, inputs = FAMILIES["bert"](0)
        sites, rng = find_sites(model, inputs), np.random.default_rng(2)
        masks = {site.name: BlockMask(rng.random((site.heads, 4, 4)) < 0.5, 8) for site in sites[:-1]}
        masks[sites[0].name].kept[1] = False
        self.plan = keep_all(sites).masked(masks)
        self.reference, self.shrunk = folder / "reference.onnx", folder / "shrunk.onnx"
        shared_export(model, self.plan, inputs, self.reference)
        save(shrink(load(self.reference), self.plan).model, self.shrunk)


@functools.cache
def masked() -> Masked:
    """A model with block masks, exported once in a test process."""
    return Masked()
