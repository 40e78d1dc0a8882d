"""Folders of finished runs for the tests of serving: a small graph, its report, and stand-ins for TensorRT engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import graph_passes
from compressor.model_folder import example_inputs
from compressor.model_folder import load as load_folder
from compressor.report import JSON_NAME
from compressor.results import EngineBuild, Report
from compressor.serving.model_files import GRAPH
from compressor.targets import target
from compressor.targets.graph_facts import digest
from compressor.targets.tensorrt.metadata import EngineMetadata, metadata_path
from compressor.units import find_sites, keep_all
from graph_passes import Plan
from tests.latency.graphs import text_model
from tests.shared_exports import shared_export


def report(*, sizes: Sequence[tuple[int, int]] = ((1, 128), (8, 128)), **fields: Any) -> Report:
    """The report of a run for ONNX Runtime on the CPU.

    Args:
        sizes: measured batch sizes and lengths.
        fields: further fields of the report.
    """
    engine = {"file": "engine.onnx", "parameters": 400, "file_bytes": 1600, "peak_memory_bytes": None, "macs": None}
    engine |= {"attentions": 0, "fused": 0, "optimization": "none"}
    times = {"p50": 1.0, "p90": 1.0, "p99": 1.0, "throughput": 1000.0, "samples": (1.0,)}
    sides = {"dense": times, "compressed": times, "ratio": 1.0, "low": 0.9, "high": 1.1}
    defaults: dict[str, Any] = {
        "verdict": "No heads were removed.",
        "model": "texts",
        "family": "bert",
        "task": None,
        "plan": {"sites": ()},
        "speeds": [{"batch": batch, "seq": seq, **sides} for batch, seq in sizes],
        "dense": engine,
        "compressed": engine,
        "target": "ort",
        "precision": "fp32",
        "session": {"provider": "CPUExecutionProvider"},
    }
    return Report.model_validate({**defaults, **fields})


def run_folder(folder: Path, **fields: Any) -> Path:
    """A folder with a small graph of texts, built for ONNX Runtime, its weights in a data file, and a tokenizer.

    Args:
        folder: the folder to create.
        fields: fields of its report.
    """
    text_model(folder)
    graph_passes.save(graph_passes.load(folder / "model.onnx"), folder / "engine.onnx")
    (folder / JSON_NAME).write_text(report(**fields).model_dump_json())
    return folder


def pruned_folder(folder: Path) -> Path:
    """The model of a folder without its first head, built for ONNX Runtime in the same folder, as after a run."""
    model = load_folder(folder)
    inputs = example_inputs(model, 2, 8)
    sites = find_sites(model.model, inputs)
    plan = Plan(sites=tuple(replace(site, kept=site.kept[1:], scale=()) for site in keep_all(sites).sites))
    shared_export(model.model, plan, inputs, folder / "reference.onnx")
    graph_passes.save(graph_passes.shrink(graph_passes.load(folder / "reference.onnx"), plan).model, folder / GRAPH)
    engine = target("ort").build(folder / GRAPH, folder / "engine.onnx", provider="cpu")
    assert engine.fused == 1, "the server has to run an operator of ONNX Runtime's own"
    (folder / JSON_NAME).write_text(report(sizes=((1, 8), (4, 8)), plan=plan.model_dump()).model_dump_json())
    return folder


def tensorrt_engine(
    folder: Path, capability: tuple[int, int], max_batch: int, *, name: str = "engine.plan", **fields: Any
) -> Path:
    """A file in place of a TensorRT engine, with its metadata in a second file.

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
