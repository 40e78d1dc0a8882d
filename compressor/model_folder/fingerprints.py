"""A hash of the function that a model computes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel

from graph_passes.attention.gate_initializers import GATE_SUFFIXES

_NO_EFFECT = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "id2label",
    "label2id",
    "problem_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Configuration entries without effect on the function that the model computes."""


def fingerprint(model: PreTrainedModel) -> str:
    """`sha256:...` of the configuration and of every tensor as float32, by name; gates are left out."""
    digest = hashlib.sha256()
    digest.update(type(model).__name__.encode())
    digest.update(json.dumps(_effective(model.config.to_diff_dict()), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith(GATE_SUFFIXES):
            continue  # gates are attached only temporarily
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        values = tensor.detach().cpu()
        digest.update((values.float() if values.is_floating_point() else values.long()).contiguous().numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _effective(config: dict[str, Any]) -> dict[str, Any]:
    """The entries that determine the function, including those of nested configurations."""
    return {
        str(name): _effective(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _NO_EFFECT
    }
