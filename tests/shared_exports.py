"""Runs of models of the same structure share one export, which takes longer than the rest of a short run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from compressor.export import export_reference, rewrite_reference
from compressor.models.sentence_encoder import SentenceEncoder
from compressor.run import variant
from graph_passes import Plan, load, save


@contextmanager
def sharing_exports(folder: Path) -> Iterator[None]:
    """Runs export each structure once; later ones get its graph with their own weights and gates, and prove it.

    Args:
        folder: an empty folder for the graphs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant, "export_reference", _sharing(folder))
        yield


def _sharing(folder: Path) -> Callable[..., None]:
    templates: dict[str, Path] = {}

    def export(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor], path: Path, **settings: Any) -> None:
        key = f"{_structure(model, plan, inputs)} {sorted(settings.items())}"
        if key in templates and rewrite_reference(templates[key], model, plan, path):
            return
        export_reference(model, plan, inputs, path, **settings)
        if not plan.masks and not isinstance(model, SentenceEncoder):  # its pooling is not in its configuration
            templates[key] = folder / f"{len(templates)}.onnx"
            save(load(path), templates[key])

    return export


def _structure(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor]) -> str:
    """A hash of what the operators and the metadata of a reference graph depend on."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name != "_name_or_path"}
    digest = hashlib.sha256(json.dumps([type(model).__name__, config], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
    digest.update(f"{[group.name for group in plan.groups]} {plan.model is None}".encode())
    for name, value in sorted(inputs.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()
