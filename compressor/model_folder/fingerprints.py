"""Hashes of a model, and of each of its parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compressor.model_folder.access import ModelAccess
from graph_passes import Plan
from graph_passes.attention.gate_initializers import GATE_SUFFIXES
from graph_passes.attention.match_plan import weight_name
from graph_passes.weights import WeightRecord
from graph_passes.weights import fingerprint as tensor_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_EFFECT = {
    *("_name_or_path", "architectures", "auto_map", "id2label", "label2id", "problem_type", "answer_kind"),
    *("dtype", "torch_dtype", "transformers_version", "use_cache"),
}
"""Configuration entries without effect on the function that the model computes."""


def fingerprint(model: PreTrainedModel) -> str:
    """`sha256:...` of the configuration of a module and of every tensor as float32, by name; gates are left out."""
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


def weight_fingerprints(model: ModelAccess) -> dict[str, str]:
    """Name in the state dict or the graph -> fingerprint, of every tensor of floating-point numbers that is no gate."""
    return {name: tensor_fingerprint(values) for name, values in model.weights.items()}


def record_weights(plan: Plan, original: Mapping[str, str], model: ModelAccess) -> Plan:
    """The plan with a record of the model's weights, by which they are recognized in graphs of other exporters.

    `original` are the `weight_fingerprints` at the start of the run.
    """
    fitted = {name: values for name, values in weight_fingerprints(model).items() if name in original}
    changed = {original[name] for name, values in fitted.items() if original[name] != values}
    readers = {weight_name(group) for group in plan.feed_forwards}
    records = {
        name: WeightRecord(original[name], values)
        for name, values in fitted.items()
        if name in readers or original[name] in changed
    }
    return plan.model_copy(update={"weights": records})


def _effective(config: dict[str, Any]) -> dict[str, Any]:
    """The entries that determine the function, including those of nested configurations."""
    return {
        str(name): _effective(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _NO_EFFECT
    }
