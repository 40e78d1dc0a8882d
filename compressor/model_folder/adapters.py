"""Adapters of peft: find that of a model folder, and merge it into the weights of its base."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.model_folder.files import CONFIG, check_finite, has_weights, read_json
from compressor.model_folder.model_class import label_count
from compressor.models.forward_changes import copy_of
from compressor.silence_libraries import one_line, quiet_tools
from graph_passes.errors import listed

ADAPTER_CONFIG, ADAPTER_WEIGHTS, _PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_TASKS = {
    "SEQ_CLS": ("text-classification", "SequenceClassification"),
    "TOKEN_CLS": ("token-classification", "TokenClassification"),
    "QUESTION_ANS": ("question-answering", "QuestionAnswering"),
    "CAUSAL_LM": ("text-generation", "CausalLM"),
    "SEQ_2_SEQ_LM": ("text2text-generation", "Seq2SeqLM"),
    "FEATURE_EXTRACTION": ("feature-extraction", "FeatureExtraction"),
}
"""peft's name of a task -> optimum's name, and the end of the name of peft's class."""
_WRAPPED = "base_model.model."
"""Prefix of the names of the base's tensors in peft."""
_TOLERANCE = 1e-4
"""Largest difference between outputs before and after merging, as a share of the largest output."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of peft.

    Attributes:
        path: its folder.
        base: the folder of the weights that it changes; may be the same.
        settings: the entries of its configuration.
        shapes: the shapes of its tensors by name.
    """

    path: Path
    base: Path
    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def file(self) -> Path:
        """Its configuration."""
        return self.path / ADAPTER_CONFIG

    @property
    def task(self) -> str | None:
        """Optimum's name of its task; None: the configuration does not name one."""
        return _TASKS.get(str(self.settings.get("task_type")), (None,))[0]

    @property
    def kind(self) -> str:
        """The name of its method, e.g. `LORA`."""
        return str(self.settings["peft_type"])

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors by name; a tensor that replaces one of the base has the same name there."""
        return {name.removeprefix(_WRAPPED): shape for name, shape in self.shapes.items()}

    @property
    def config_folder(self) -> Path:
        """The folder of the model's configuration."""
        return self.path if (self.path / CONFIG).is_file() else self.base

    def fit_labels(self, cls: Any, config: PretrainedConfig) -> None:
        """Set the number of classes of a configuration to that of the adapter's head."""
        if self.settings.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
            count = label_count(cls, config, self.whole)
            if count is not None and count != config.num_labels:
                config.num_labels = count


def find_adapter(path: Path, *, remote: bool = False) -> Adapter | None:
    """The adapter of a folder; None if it has none.

    Args:
        remote: whether the code of the folder runs; it decides on adapters in subfolders.

    Raises:
        InputError: a file of the adapter is missing, damaged or pickled, its base is not on this machine, or adapters
            are in subfolders, so that none is chosen.
    """
    file = path / ADAPTER_CONFIG
    if not file.is_file():
        _check_no_adapter(path, remote=remote)
        return None
    settings = read_json(file)
    if not isinstance(settings, dict) or not isinstance(settings.get("peft_type"), str):
        text = (
            "has no peft_type and is not an adapter of peft; merge the adapter with the library that wrote it,"
            " and save the model as a whole"
        )
        raise InputError.of_file(file, text, ErrorCode.FILE_UNREADABLE, field="peft_type")
    shapes = _shapes(path)
    base = path if has_weights(path) else _base(file, settings)
    if base != path and (base / ADAPTER_CONFIG).is_file():
        raise InputError.of_file(
            file,
            f"its base {base} has an adapter of its own ({ADAPTER_CONFIG}), so one of them would have to follow"
            " the other; merge that one first (merge_and_unload), and name the folder of the result as"
            " base_model_name_or_path",
            ErrorCode.UNSUPPORTED_MODEL,
            field="base_model_name_or_path",
            value=str(base),
        )
    return Adapter(path, base, settings, shapes)


def source_folders(path: Path) -> tuple[Path, ...]:
    """The folders that are read for a model: its own, and that of the base of its adapter.

    Raises:
        InputError: the adapter cannot be used, see `find_adapter`.
    """
    adapter = find_adapter(path, remote=True)
    return (path,) if adapter is None or adapter.base == path else (path, adapter.base)


def _check_no_adapter(path: Path, *, remote: bool) -> None:
    """Raise InputError for weights of an adapter without its configuration, and for adapters in subfolders.

    Checkpoints of a training are no adapters that the folder could be meant for.
    """
    stray = next((name for name in (ADAPTER_WEIGHTS, _PICKLED) if (path / name).is_file()), None)
    if stray is not None:
        raise InputError.of_file(
            path / stray,
            f"the weights of an adapter, but there is no {ADAPTER_CONFIG} that says how they are added;"
            " copy it too, or move the file out of the folder to use the model without it",
            ErrorCode.FILE_MISSING,
        )
    inner = sorted(file.parent.name for file in path.glob(f"*/{ADAPTER_CONFIG}"))
    names = [name for name in inner if not name.startswith("checkpoint-")]
    if names and not remote:
        text = (
            f"has adapters in its folders {listed(names, 3)}, and nothing says which one is used; give that"
            f" folder as the model, e.g. {path / names[0]}, or move them out to use the model without them"
        )
        raise InputError.of_file(path, text, ErrorCode.UNSUPPORTED_MODEL, adapters=tuple(names))


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of an adapter by name; raise InputError if they cannot be read."""
    file, pickled = path / ADAPTER_WEIGHTS, path / _PICKLED
    if not file.is_file() and pickled.is_file():
        code = f"save_file(torch.load('{pickled}', weights_only=True), '{file}')"
        raise InputError.of_file(
            pickled,
            f"reading pickled weights can run code; save them as {ADAPTER_WEIGHTS}: python -c"
            f' "import torch; from safetensors.torch import save_file; {code}"',
            ErrorCode.UNSAFE_CODE,
        )
    if not file.is_file():
        text = f"missing, but {ADAPTER_CONFIG} describes it; copy it too"
        raise InputError.of_file(file, text, ErrorCode.FILE_MISSING)
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        text = f"is damaged or truncated ({one_line(error)}); copy or download it again"
        raise InputError.of_file(file, text, ErrorCode.FILE_UNREADABLE) from error


def _base(file: Path, settings: Mapping[str, Any]) -> Path:
    """The folder of the base that an adapter names; raise InputError if it is not on this machine."""
    name = settings.get("base_model_name_or_path")
    folders = [Path(name), file.parent / name] if isinstance(name, str) and name else []
    for folder in folders:
        if folder.is_dir():
            return folder
    problem = f"its base {name} is no folder on this machine" if folders else "does not name its base"
    cls = f"AutoPeftModel{'For' if settings.get('task_type') in _TASKS else ''}"
    cls += _TASKS.get(str(settings.get("task_type")), ("", ""))[1]
    merging = (
        f"from peft import {cls} as M; M.from_pretrained('{file.parent}').merge_and_unload().save_pretrained('merged')"
    )
    text = (
        f"{problem}, and nothing is downloaded; write the base's folder into base_model_name_or_path, or merge"
        f' where it can be loaded, and copy the tokenizer to the result: python -c "{merging}"'
    )
    raise InputError.of_file(file, text, ErrorCode.FILE_MISSING, field="base_model_name_or_path", value=name)


def merge_adapter(adapter: Adapter, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> PreTrainedModel:
    """Merge an adapter into the weights of a model; the outputs of a forward prove that it computes the same.

    Args:
        model: the model of its base, in evaluation mode; it is changed.

    Raises:
        TargetMissingError: peft is not installed.
        InputError: the adapter belongs to another model, or changes more than weights.
    """
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        text = f"{adapter.file}: an adapter ({adapter.kind}), and peft, which merges it, is not installed"
        raise TargetMissingError.of_package("peft", "adapters", text, path=adapter.file) from error
    with quiet_tools():
        wrapped = _wrap(peft, adapter, model).eval()
        expected = _outputs(model, inputs)
        try:
            merged: PreTrainedModel = wrapped.merge_and_unload(safe_merge=True)
        except Exception as error:  # each method of peft has errors of its own
            raise _unmergeable(adapter, f"cannot be merged ({one_line(error)})") from error
    if any(type(module).__module__.startswith("peft.") for module in merged.modules()):
        raise _unmergeable(adapter, "leaves layers of its own in the model")
    difference = _difference(expected, _outputs(merged, inputs))
    if not difference <= _TOLERANCE:
        reason = f"computes another function when it is merged (the outputs differ by {difference:.1%})"
        raise _unmergeable(adapter, f"{reason}, as if it changed weights that several layers share")
    return merged


def _read_settings(peft: Any, adapter: Adapter) -> Any:
    """The configuration of an adapter as peft reads it; raise InputError if it would ignore an entry."""
    try:
        config = peft.PeftConfig.from_pretrained(adapter.path)
    except Exception as error:  # an unknown method, or values of any kind
        text = (
            f"peft {peft.__version__} cannot read it ({one_line(error)}); correct it, or install the peft that"
            f" wrote it ({adapter.settings.get('peft_version') or 'newer'})"
        )
        raise InputError.of_file(adapter.file, text, ErrorCode.FILE_UNREADABLE, reason=one_line(error)) from error
    known = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(name for name, value in adapter.settings.items() if value and name not in known)
    if unknown:
        text = (
            f"peft {peft.__version__} does not know {unknown[0]}, so the adapter would be another one; install"
            f" the peft that wrote it ({adapter.settings.get('peft_version') or 'newer'})"
        )
        raise InputError.of_file(adapter.file, text, ErrorCode.UNSUPPORTED, field=unknown[0])
    if getattr(config, "megatron_config", None):
        # peft imports the module that the entry megatron_core names.
        raise _unmergeable(adapter, "is for parallel layers of Megatron (megatron_config)")
    if config.is_prompt_learning:
        raise _unmergeable(adapter, "adds inputs to the model and changes no weights")
    config.inference_mode = True
    return config


def _wrap(peft: Any, adapter: Adapter, model: PreTrainedModel) -> Any:
    """The model with the layers of the adapter; raise InputError if they do not fit."""
    config = _read_settings(peft, adapter)
    # peft's class of a task replaces the head, which not every adapter has, and which older adapters do not list.
    replaces = not adapter.whole.keys().isdisjoint(model.state_dict())
    cls = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type if replaces else None, peft.PeftModel)
    try:
        wrapped = cls(model, config)
        mapping = getattr(model, "_checkpoint_conversion_mapping", {})
        result = wrapped.load_adapter(adapter.path, "default", torch_device="cpu", key_mapping=mapping)
    except Exception as error:  # the errors of a wrong base depend on the method
        reason = f"its weights lack {error.args[0]}" if isinstance(error, KeyError) else one_line(error)
        text = (
            f"the adapter does not fit the model in {adapter.base} ({reason}); name the base that it"
            " was trained on (base_model_name_or_path)"
        )
        raise InputError.of_file(adapter.file, text, ErrorCode.FILE_MISMATCH, reason=reason) from error
    missing, unexpected = sorted(result.missing_keys), sorted(result.unexpected_keys)
    if missing or unexpected:
        parts = [f"has {listed(unexpected, 3)}, which the model lacks"] * bool(unexpected)
        parts += [f"lacks {listed(missing, 3)}"] * bool(missing)
        raise InputError.of_file(
            adapter.path / ADAPTER_WEIGHTS,
            f"does not fit the model in {adapter.base}: it {' and '.join(parts)};"
            f" name the base that it was trained on (base_model_name_or_path in {ADAPTER_CONFIG})",
            ErrorCode.FILE_MISMATCH,
            tensors=tuple(missing),
            unexpected=tuple(unexpected),
        )
    check_finite(adapter.path, wrapped)
    return wrapped


def _unmergeable(adapter: Adapter, reason: str) -> InputError:
    text = (
        f"the adapter ({adapter.kind}) {reason}; train one that changes the weights of"
        " linear layers, as LoRA does, or fine-tune the whole model"
    )
    return InputError.of_file(adapter.file, text, ErrorCode.UNSUPPORTED_MODEL, field="peft_type", value=adapter.kind)


def _outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The floating-point outputs of a copy of a model, since some models change when they run."""
    with torch.no_grad():
        output = copy_of(model)(**inputs)
    values = output.to_tuple() if isinstance(output, ModelOutput) else output
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _difference(expected: list[Tensor], outputs: list[Tensor]) -> float:
    """The largest difference of outputs, as a share of the largest value of the output; may be NaN."""
    pairs = zip(expected, outputs, strict=True)
    shares = [(after - before).abs().max() / before.abs().max() for before, after in pairs]
    return float(torch.stack(shares).max()) if shares else float("nan")
