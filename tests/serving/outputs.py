"""Folders of finished runs for the tests of serving: a small graph, its report, and stand-ins for TensorRT engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graph_passes
from compressor.report import write
from compressor.results import EngineBuild
from compressor.targets.tensorrt.metadata import EngineMetadata, digest, metadata_path
from tests import reports
from tests.latency.graphs import text_model


def run_folder(folder: Path) -> Path:
    """A folder with a small graph of texts, built for ONNX Runtime, its weights in a data file, and a tokenizer."""
    text_model(folder)
    graph_passes.save(graph_passes.load(folder / "model.onnx"), folder / "engine.onnx")
    write(reports.report(), folder)
    return folder


def tensorrt_engine(
    folder: Path, capability: tuple[int, int], max_batch: int, *, name: str = "engine.plan", **fields: Any
) -> Path:
    """A file in place of a TensorRT engine, with its metadata beside it.

    Args:
        folder: where to write it; created if missing.
        capability: compute capability of its GPU.
        max_batch: rows per batch at most.
        name: name of the file.
        fields: further fields of the metadata, `graph_hash` among them.
    """
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(repr(capability).encode())
    profile = ((1, 1), (2, 8), (max_batch, 16))
    defaults: dict[str, Any] = {
        "tensorrt": "10.9.0",
        "gpu": f"GPU {capability}",
        "capability": capability,
        "precision": "fp16",
        "profiles": {"input_ids": profile, "attention_mask": profile},
        "inputs": {"input_ids": "int32", "attention_mask": "int32"},
        "outputs": {"logits": "float32"},
        "engine_hash": digest(path),
        "hardware_compatible": False,
        "version_compatible": False,
        "attentions": 1,
        "fused": 1,
        "optimization": "",
        "session": {},
        "built": EngineBuild(seconds=1, engine_bytes=1, weight_bytes=1, activation_bytes=1, attention=""),
    }
    metadata_path(path).write_text(EngineMetadata(**{**defaults, **fields}).model_dump_json())
    return path
