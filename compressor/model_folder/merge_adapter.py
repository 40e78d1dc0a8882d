"""Merge an adapter into the weights of its base with peft, and prove the result."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.model_folder.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter
from compressor.model_folder.weight_checks import check_finite, first_names
from compressor.models.model_copy import copy_of
from compressor.silence_libraries import one_line, quiet_tools

_TOLERANCE = 1e-4
"""Largest difference of outputs by merging, as a share of the largest output."""


def merge_adapter(adapter: Adapter, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model with the adapter in its weights, which is proven to compute what the two compute together.

    Args:
        adapter: the adapter.
        model: the model of its base, in evaluation mode; it is changed.
        inputs: keyword arguments of the model's forward.

    Raises:
        TargetMissingError: peft is not installed.
        InputError: the adapter belongs to another model, or changes more than weights.
    """
    peft = _import_peft(adapter)
    with quiet_tools():
        together = _wrap(peft, adapter, model).eval()
        expected = _outputs(model, inputs)
        try:
            merged: PreTrainedModel = together.merge_and_unload(safe_merge=True)
        except Exception as error:  # the methods of peft have their own errors of what they cannot merge
            raise _unmergeable(adapter, f"cannot be merged ({one_line(error)})") from error
    if any(type(module).__module__.startswith("peft.") for module in merged.modules()):
        raise _unmergeable(adapter, "leaves layers of its own in the model")
    difference = _difference(expected, _outputs(merged, inputs))
    if not difference <= _TOLERANCE:
        reason = f"computes another function when it is merged (the outputs differ by {difference:.1%})"
        raise _unmergeable(adapter, f"{reason}, as if it changed weights that several layers share")
    return merged


def _import_peft(adapter: Adapter) -> Any:
    """The library; raise TargetMissingError if it is not installed."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        text = (
            f"{adapter.path / ADAPTER_CONFIG}: an adapter ({adapter.kind}), and peft, which merges it, is not installed"
        )
        raise TargetMissingError.of_package("peft", "adapters", text, path=adapter.path / ADAPTER_CONFIG) from error


def _read_settings(peft: Any, adapter: Adapter) -> Any:
    """The configuration of an adapter as peft reads it; raise InputError if it would ignore an entry."""
    file = adapter.path / ADAPTER_CONFIG
    try:
        config = peft.PeftConfig.from_pretrained(adapter.path)
    except Exception as error:  # an unknown method, or values of any kind
        raise InputError(
            f"{file}: peft {peft.__version__} cannot read it ({one_line(error)}); correct it, or install the peft that"
            f" wrote it ({adapter.settings.get('peft_version') or 'newer'})",
            code=ErrorCode.FILE_UNREADABLE,
            path=file,
            reason=one_line(error),
        ) from error
    known = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(name for name, value in adapter.settings.items() if value and name not in known)
    if unknown:
        raise InputError(
            f"{file}: peft {peft.__version__} does not know {unknown[0]}, so the adapter would be another one; install"
            f" the peft that wrote it ({adapter.settings.get('peft_version') or 'newer'})",
            code=ErrorCode.UNSUPPORTED,
            path=file,
            field=unknown[0],
        )
    if getattr(config, "megatron_config", None):
        # peft imports the module that the entry megatron_core names.
        raise _unmergeable(adapter, "is for parallel layers of Megatron (megatron_config)")
    if config.is_prompt_learning:
        raise _unmergeable(adapter, "adds inputs to the model and changes no weights")
    config.inference_mode = True
    return config


def _wrap(peft: Any, adapter: Adapter, model: PreTrainedModel) -> Any:
    """The model with the layers of the adapter, as peft makes it; raise InputError if they do not fit."""
    file = adapter.path / ADAPTER_CONFIG
    config = _read_settings(peft, adapter)
    # peft's class of a task replaces the head, which not every adapter brings, and which older ones do not list.
    replaces = not adapter.whole.keys().isdisjoint(model.state_dict())
    cls = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type if replaces else None, peft.PeftModel)
    try:
        together = cls(model, config)
        mapping = getattr(model, "_checkpoint_conversion_mapping", {})
        result = together.load_adapter(adapter.path, "default", torch_device="cpu", key_mapping=mapping)
    except Exception as error:  # the errors of a wrong base depend on the method
        reason = f"its weights lack {error.args[0]}" if isinstance(error, KeyError) else one_line(error)
        raise InputError(
            f"{file}: the adapter does not fit the model in {adapter.base} ({reason}); name the base that it"
            " was trained on (base_model_name_or_path)",
            code=ErrorCode.FILE_MISMATCH,
            path=file,
            reason=reason,
        ) from error
    missing, others = sorted(result.missing_keys), sorted(result.unexpected_keys)
    if missing or others:
        parts = [f"has {first_names(others)}, which the model lacks"] * bool(others)
        parts += [f"lacks {first_names(missing)}"] * bool(missing)
        raise InputError(
            f"{adapter.path / ADAPTER_WEIGHTS}: does not fit the model in {adapter.base}: it {' and '.join(parts)};"
            f" name the base that it was trained on (base_model_name_or_path in {ADAPTER_CONFIG})",
            code=ErrorCode.FILE_MISMATCH,
            path=adapter.path / ADAPTER_WEIGHTS,
            tensors=tuple(missing),
            unexpected=tuple(others),
        )
    check_finite(adapter.path, together)
    return together


def _unmergeable(adapter: Adapter, reason: str) -> InputError:
    return InputError(
        f"{adapter.path / ADAPTER_CONFIG}: the adapter ({adapter.kind}) {reason}; train one that changes the weights of"
        " linear layers, as LoRA does, or fine-tune the whole model",
        code=ErrorCode.UNSUPPORTED_MODEL,
        path=adapter.path / ADAPTER_CONFIG,
        field="peft_type",
        value=adapter.kind,
    )


def _outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs that are tensors of numbers, of a copy: some models change when they run, and proofs follow."""
    with torch.no_grad():
        output = copy_of(model)(**inputs)
    values = output.to_tuple() if isinstance(output, ModelOutput) else output
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _difference(expected: list[Tensor], outputs: list[Tensor]) -> float:
    """The largest difference of outputs as a share of the largest value of that output; NaN where one is no number."""
    shares = [
        (after - before).abs().max() / before.abs().max() for before, after in zip(expected, outputs, strict=True)
    ]
    return float(torch.stack(shares).max()) if shares else float("nan")
