"""Models of the same structure share one export, and equal graphs one fusion, which take most of a short run."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from compressor.engines.trials import EngineTrials
from compressor.export import export_reference, rewrite_reference
from compressor.generation.export import DECODER, ENCODER, export_generation
from compressor.models.pooled_encoder import PooledEncoder, SentenceEncoder
from compressor.targets import Engine, Feeds
from compressor.targets.example_rows import EXAMPLE_ROWS, record_example_rows
from compressor.targets.onnxruntime import engine
from compressor.targets.onnxruntime.engine import Fusion, OrtEngine, Rewrite
from compressor.targets.openvino.engine import OpenVinoEngine
from graph_passes import Plan, load, save
from graph_passes.attention.gate_initializers import find_gates
from graph_passes.passes.insert_gates import FINGERPRINT
from tests.written_once import FOLDER

_WITHOUT_EFFECT = frozenset(
    ("_name_or_path", "architectures", "dtype", "id2label", "initializer_range", "label2id", "problem_type")
)
"""Entries of a configuration that neither operators nor metadata of a graph depend on."""


@contextmanager
def sharing_exports() -> Iterator[None]:
    """Runs export each structure once; later ones get its graph with their own weights and gates, and prove it.

    They fuse each graph for ONNX Runtime once; later ones get the fused graph with its error. The memory of one engine
    of each runtime is measured.
    """
    from compressor.engines import export_module
    from compressor.generation import export_module as cached_export
    from compressor.run import proof_lengths, stages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_export, "export_generation", shared_generation)
        for module in (export_module, proof_lengths):
            patch.setattr(module, "export_reference", shared_export)
        patch.setattr(engine, "fuse", shared_fusion)
        patch.setattr(stages, "facts_of", _measuring_memory_once(stages.facts_of))
        patch.setattr(EngineTrials, "measure_memory", _measuring_memory_once(EngineTrials.measure_memory))
        yield


_MEMORY: dict[type[Engine], int | None] = {}
"""Runtime -> peak memory of its first engine."""


def _measuring_memory_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that measures the memory of engines, which is that of the first engine of their runtime."""

    def first(measure: Callable[..., int | None]) -> Callable[..., int | None]:
        def memory(self: Engine, feeds: Feeds) -> int | None:
            if type(self) not in _MEMORY:
                _MEMORY[type(self)] = measure(self, feeds)
            return _MEMORY[type(self)]

        return memory

    def call(*arguments: Any, **settings: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for kind in (OrtEngine, OpenVinoEngine):
                patch.setattr(kind, "memory", first(kind.memory))
            return function(*arguments, **settings)

    return call


_fuse = engine.fuse


def shared_fusion(
    source: Path, out: Path, settings: Mapping[str, Any], rewrite: Rewrite = engine.rewrite_for_ort
) -> Fusion:
    """As `compressor.targets.onnxruntime.engine.fuse`, but equal graphs are fused once by `FuseForOrt`."""
    if rewrite is not engine.rewrite_for_ort:
        return _fuse(source, out, settings, rewrite)
    digest = hashlib.sha256(json.dumps([out.name, dict(settings)], sort_keys=True, default=str).encode())
    for file in _files(source):
        digest.update(f"{file.name.removeprefix(source.name)} {file.stat().st_size}".encode() + file.read_bytes())
    kept = _folder() / f"fused {digest.hexdigest()}" / out.name
    if kept.parent.is_dir():
        for file in _files(kept):
            shutil.copyfile(file, out.with_name(file.name))
        return Fusion(**json.loads((kept.parent / "fusion.json").read_text()))
    fusion = _fuse(source, out, settings, rewrite)
    with _written(kept.parent) as folder:
        for file in _files(out):
            shutil.copyfile(file, folder / file.name)
        (folder / "fusion.json").write_text(json.dumps(asdict(fusion)))
    return fusion


def _files(graph: Path) -> list[Path]:
    """The file of a graph, and that of its weights."""
    return [path for path in (graph, graph.with_name(f"{graph.name}.data")) if path.is_file()]


@contextmanager
def _written(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` unless another process has written that before."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        filled = Path(scratch) / "filled"
        filled.mkdir()
        yield filled
        with suppress(OSError):
            filled.rename(folder)


def shared_export(
    model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor], path: Path, **settings: Any
) -> None:
    """As `export_reference`, but each structure is exported once."""
    template = _folder() / _structure(model, plan, inputs, settings)
    if template.is_dir() and (plan.masks or rewrite_reference(template / "graph.onnx", model, plan, path)):
        program = load(template / "graph.onnx" if plan.masks else path)
        if (example := settings.get("example")) is not None:
            record_example_rows(program, example)
        if plan.model is not None:
            program.metadata_props[FINGERPRINT] = plan.model
        save(program, path)
        return
    export_reference(model, plan, inputs, path, **settings)
    with _written(template) as folder:
        program = load(path)
        for entry in (EXAMPLE_ROWS, FINGERPRINT):
            program.metadata_props.pop(entry, None)
        save(program, folder / "graph.onnx")


def shared_generation(model: PreTrainedModel, plan: Plan, folder: Path, **settings: Any) -> tuple[str, ...]:
    """As `export_generation`, but each structure is exported once."""
    template = _folder() / f"cached-{_structure(model, plan, {}, settings)}"
    if not template.is_dir():
        with tempfile.TemporaryDirectory(dir=template.parent) as written, suppress(OSError):
            export_generation(model, plan, written, **settings)
            Path(written).rename(template)  # fails if another process has written the same structure
            Path(written).mkdir()  # which is removed
    files = tuple(name for name in (ENCODER, DECODER) if (template / name).is_file())
    for name in files:
        part = plan.part(find_gates(load(template / name).graph))
        assert rewrite_reference(template / name, model, part, folder / name)
    return files


@functools.cache
def _folder() -> Path:
    folder = Path(os.environ[FOLDER])
    folder.mkdir(exist_ok=True)
    return folder


def _structure(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """A hash of what the operators and the metadata of a reference graph depend on."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in _WITHOUT_EFFECT}
    digest = hashlib.sha256(json.dumps([type(model).__name__, config], sort_keys=True, default=str).encode())
    if isinstance(model, PooledEncoder):
        digest.update(f"{model.settings} {model.pool_in_graph}".encode())
    if isinstance(model, SentenceEncoder) and model.documents is not None:
        digest.update(f"{tuple(model.documents.shape)}".encode() + model.documents.numpy().tobytes())
    for name, module in model.named_modules():  # block-sparse attention may be that of transformers, or a mask
        digest.update(f"{name} {type(module).__module__}.{type(module).__qualname__}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    if plan.masks:  # such a graph is not rewritten: it is that of the same masks, gates and weights only
        digest.update(plan.model_dump_json().encode())
        for name, mask in sorted(plan.masks.items()):
            digest.update(f"{name} {mask.kept.shape} {mask.block} {mask.memory}".encode() + mask.kept.tobytes())
        for tensor in model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    settings = {"opset": 18, "attention": "eager", "fixed": (), **settings}
    settings.pop("example", None)
    digest.update(f"{[group.name for group in plan.groups]} {sorted(settings.items())}".encode())
    for name, value in sorted(inputs.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())  # a trace knows no values
    return digest.hexdigest()
