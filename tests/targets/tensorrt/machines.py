"""Versions of TensorRT, a GPU, and metadata of an engine for it, for tests on machines without either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor.results import EngineBuild
from compressor.targets.cuda import Device
from compressor.targets.graph_facts import digest
from compressor.targets.tensorrt.bindings import Features
from compressor.targets.tensorrt.metadata import EngineMetadata

OLD = Features("8.6.1", strongly_typed=False, int64=False, precisions=("fp32", "fp16", "int8"), tactics=())
NEW = Features(
    "10.16.1",
    strongly_typed=True,
    int64=True,
    precisions=("fp32", "fp16", "bf16", "int8", "fp8"),
    tactics=(),
)
H200 = Device("NVIDIA H200", (9, 0), 1 << 37)


def write_engine(path: Path, **changes: Any) -> EngineMetadata:
    """Write a file in place of an engine, with its metadata.

    Args:
        path: the engine's file.
        changes: fields of the metadata.
    """
    path.write_bytes(b"an engine")
    fields: dict[str, Any] = {
        "tensorrt": "10.16.1",
        "gpu": H200.name,
        "capability": H200.capability,
        "precision": "fp16",
        "profiles": {"ids": ((1, 1), (8, 128), (32, 384))},
        "inputs": {"ids": "int64"},
        "outputs": {"logits": "float32"},
        "engine_hash": digest(path),
        "graph_hash": "sha256:0",
        "hardware_compatible": False,
        "version_compatible": False,
        "attentions": 12,
        "fused": 12,
        "optimization": "",
        "session": {},
        "built": EngineBuild(seconds=1, engine_bytes=9, weight_bytes=None, activation_bytes=0, attention=""),
    }
    metadata = EngineMetadata(**{**fields, **changes})
    metadata.write(path)
    return metadata
