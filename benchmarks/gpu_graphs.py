"""The graphs of `benchmarks.gpu`: BERT-base's shape with 144, 72 and 12 heads, with or without their random weights."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from graph_passes import load, save, shrink
from graph_passes.files import atomic_replace

DENSE, KEPT = 144, (72, 12)
"""Number of heads of the dense graph, and numbers of kept heads of the others."""


def graph_paths(folder: Path) -> dict[int, Path]:
    """Number of heads -> file of the graph."""
    return {heads: folder / f"{heads}.onnx" for heads in (DENSE, *KEPT)}


def export(folder: Path, seed: int) -> None:
    """Write the graphs; this needs PyTorch.

    Args:
        folder: the folder to write them to.
        seed: seed of the weights and of the heads that are dropped.
    """
    from benchmarks.speed import plans
    from compressor.export import export_reference

    folder.mkdir(parents=True, exist_ok=True)
    model, inputs, plan_of = plans("base", seed)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        reference = Path(scratch) / "reference.onnx"
        for heads, path in graph_paths(folder).items():
            export_reference(model, plan_of[heads], inputs, reference)
            save(shrink(load(reference), plan_of[heads]).model, path)


def remove_weights(path: Path) -> None:
    """Delete the file of a graph's weights, which the graph still refers to; other tensors move into the graph."""
    model = onnx.load(path, load_external_data=False)
    files = set()
    for tensor in external_tensors(model):
        files.add(path.with_name(ExternalDataInfo(tensor).location))
        if tensor.data_type != onnx.TensorProto.FLOAT:
            load_external_data_for_tensor(tensor, str(path.parent))
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
    with atomic_replace(path) as temporary:
        onnx.save_model(model, temporary)
    for file in files:
        file.unlink()


def draw_weights(path: Path) -> None:
    """Draw the weights of a graph whose file of weights is missing, as in a new BERT: norms are one, vectors zero."""
    tensors = external_tensors(onnx.load(path, load_external_data=False))
    for location in {ExternalDataInfo(tensor).location for tensor in tensors}:
        file = path.with_name(location)
        if file.is_file():
            continue
        with atomic_replace(file) as temporary, temporary.open("wb") as out:
            for tensor in tensors:
                rng = np.random.default_rng(zlib.crc32(tensor.name.encode()))
                scale = 0.02 if len(tensor.dims) > 1 else 0.0
                weights = rng.standard_normal(tensor.dims, np.float32) * np.float32(scale)
                out.seek(ExternalDataInfo(tensor).offset or 0)
                out.write((weights + np.float32(tensor.name.endswith("LayerNorm.weight"))).tobytes())


def external_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The initializers whose content is in another file."""
    return [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
