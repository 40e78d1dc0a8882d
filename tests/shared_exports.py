"""Models of the same structure share one export, which takes longer than the rest of a short run."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from compressor.export import export_reference, rewrite_reference
from compressor.generation.export import DECODER, ENCODER, export_generation
from compressor.models.sentence_encoder import SentenceEncoder
from graph_passes import Plan, load, save
from graph_passes.attention.gate_initializers import find_gates

FOLDER = "COMPRESSOR_TEST_EXPORTS"
"""Environment variable with the folder of the exports, which the processes of one pytest run have in common."""


@contextmanager
def sharing_exports() -> Iterator[None]:
    """Runs export each structure once; later ones get its graph with their own weights and gates, and prove it."""
    from compressor.engines import export
    from compressor.generation import deliver

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "export_reference", shared_export)
        patch.setattr(deliver, "export_generation", shared_generation)
        yield


def shared_export(
    model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor], path: Path, **settings: Any
) -> None:
    """As `export_reference`, but each structure is exported once."""
    template = _folder() / _structure(model, plan, inputs, settings)
    if template.is_dir():
        if plan.masks:
            save(load(template / "graph.onnx"), path)
            return
        if rewrite_reference(template / "graph.onnx", model, plan, path):
            return
    export_reference(model, plan, inputs, path, **settings)
    if not isinstance(model, SentenceEncoder):  # its pooling is not in its configuration
        with tempfile.TemporaryDirectory(dir=template.parent) as folder, suppress(OSError):
            written = Path(folder) / "template"
            written.mkdir()
            save(load(path), written / "graph.onnx")
            written.rename(template)  # fails if another process has written the same structure


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
    config = {name: value for name, value in model.config.to_diff_dict().items() if name != "_name_or_path"}
    digest = hashlib.sha256(json.dumps([type(model).__name__, config], sort_keys=True, default=str).encode())
    for name, module in model.named_modules():  # block-sparse attention may be that of transformers, or a mask
        digest.update(f"{name} {type(module).__module__}.{type(module).__qualname__}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
    if plan.masks:  # such a graph is not rewritten: it is that of the same masks, gates and weights only
        digest.update(plan.model_dump_json().encode())
        for name, mask in sorted(plan.masks.items()):
            digest.update(f"{name} {mask.kept.shape} {mask.block} {mask.memory}".encode() + mask.kept.tobytes())
        for tensor in model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    settings = {"opset": 18, "attention": "eager", "fixed": (), **settings}
    digest.update(f"{[group.name for group in plan.groups]} {plan.model is None} {sorted(settings.items())}".encode())
    for name, value in sorted(inputs.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()
