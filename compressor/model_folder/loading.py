"""Loading a model folder: every fault is found before anything runs, and is one line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, PretrainedConfig, PreTrainedModel

from compressor.errors import InputError
from compressor.model_folder.model_class import model_class
from compressor.model_folder.weight_checks import check_finite, check_weight_files
from compressor.silence_libraries import one_line, quiet_transformers
from graph_passes.attention.gates import SUFFIX

_NO_FUNCTION = {
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
"""Configuration entries that can change while the function that the model computes stays."""

_PROCESSOR_FILES = ("tokenizer_config.json", "tokenizer.json", "preprocessor_config.json", "processor_config.json")
_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm")


@dataclass(frozen=True)
class ModelFolder:
    """A loaded model folder.

    Attributes:
        path: where it lies.
        model: float32, in evaluation mode.
        processor: tokenizer, or the processor of images or sound; None where the folder has none.
        config: the model's configuration.
        fingerprint: `sha256:...` over weights and configuration, the same whatever precision the file is stored in.
        task: `text-classification`, `regression`, `causal-lm`, `question-answering`, or optimum's name of another task.
        family: transformers' model type, e.g. `bert`.
        notes: what a reader must know, e.g. tensors of the folder that the model has no use for.
    """

    path: Path
    model: PreTrainedModel
    processor: Any
    config: PretrainedConfig
    fingerprint: str
    task: str
    family: str
    notes: tuple[str, ...] = ()


def load(
    path: str | Path,
    *,
    task: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    needs_processor: bool = True,
) -> ModelFolder:
    """Load a model folder; nothing is fetched.

    Args:
        path: the folder.
        task: what the model is for, where its class does not say it well.
        allow_pickle: load `pytorch_model.bin` too; reading it can run code.
        trust_remote_code: run the Python files that the folder brings.
        needs_processor: refuse a model of text that comes without its tokenizer.

    Raises:
        InputError: the folder cannot be used; one line says what is wrong and how to mend it.
        UsageError: the task does not exist, or the family has no class for it.
    """
    path = Path(path)
    raw = _raw_config(path)
    if raw.get("auto_map") and not trust_remote_code:
        raise InputError(
            f"{path}: brings its own Python code (auto_map in config.json), which is not run unasked; read it, then add"
            " --trust-remote-code"
        )
    pickled = check_weight_files(path, raw, allow_pickle)
    remote = bool(raw.get("auto_map")) and trust_remote_code
    with quiet_transformers():
        config = _config(path, trust_remote_code)
        cls, name = model_class(path, config, task, remote)
        model, info = _model(path, cls, config, pickled, remote)
        processor = load_processor(path, trust_remote_code)
    _check_complete(path, type(model).__name__, info)
    check_finite(path, model)
    if processor is None and needs_processor and model.main_input_name == "input_ids":
        raise InputError(f"{path}: no tokenizer; save the model's own there (tokenizer.save_pretrained)")
    _name_padding(model, name, processor)
    unused = sorted(info["unexpected_keys"])
    notes = (f"{len(unused)} tensors of {path} have no place in {cls.__name__}, e.g. {unused[0]}",) if unused else ()
    return ModelFolder(path, model, processor, model.config, fingerprint(model), name, model.config.model_type, notes)


def fingerprint(model: PreTrainedModel) -> str:
    """`sha256:...` over what decides the model's function: configuration, and every tensor as float32 by name."""
    digest = hashlib.sha256()
    digest.update(type(model).__name__.encode())
    digest.update(json.dumps(_entries(model.config.to_diff_dict()), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith(SUFFIX):
            continue  # A gate is on the model, not of it.
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        whole = tensor.detach().cpu()
        digest.update((whole.float() if whole.is_floating_point() else whole.long()).contiguous().numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _entries(config: dict[str, Any]) -> dict[str, Any]:
    """The entries that decide the function, those of nested configurations too."""
    return {
        str(name): _entries(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _NO_FUNCTION
    }


def _raw_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise InputError(f"{path}: no such folder; give the folder that save_pretrained wrote")
    if not path.is_dir():
        raise InputError(f"{path}: is a file; give the model's folder")
    file = path / "config.json"
    if not file.is_file():
        state = "holds no config.json" if any(path.iterdir()) else "is empty"
        raise InputError(f"{path}: {state}; give the folder that save_pretrained wrote")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({one_line(error)}); copy it again") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise InputError(
            f"{file}: names no model_type, so it is not a transformers configuration; save the model again"
        )
    return raw


def _config(path: Path, remote: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=remote)
    except Exception as error:
        # A configuration is free-form: whichever of its values breaks whichever family's class, the file is at fault.
        raise InputError(
            f"{path / 'config.json'}: cannot be used ({one_line(error)}); mend or copy it again"
        ) from error


def _model(
    path: Path, cls: Any, config: PretrainedConfig, pickled: bool, remote: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    # Auto classes alone know the flag; a class of transformers takes it for a configuration entry.
    code = {"trust_remote_code": True} if remote else {}
    try:
        model, info = cls.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=not pickled,
            output_loading_info=True,
            **code,
        )
    except Exception as error:
        # Weights of other shapes, a quantisation whose library is absent, a pickle that is none: all the folder's.
        raise InputError(
            f"{path}: the weights do not load as {cls.__name__} ({one_line(error)}); save model and configuration"
            " together"
        ) from error
    return model.float().eval(), info


def _check_complete(path: Path, name: str, info: dict[str, Any]) -> None:
    """Weights that the file lacks would be drawn at random: the run would be of another model."""
    missing = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{path}: no weights for {missing[0]}{more}, which {name} needs; fine-tune and save that head first, or"
            " name the task that the folder was saved for (--task)"
        )


def _name_padding(model: PreTrainedModel, task: str, processor: Any) -> None:
    """Give a classifier a padding token: a language model that classifies answers at the last token that is none.

    Its tokenizer often has no padding of its own; the end token then serves for it.
    """
    config = model.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)
    if task in ("text-classification", "regression") and (padding is None or padding < 0):
        named = [getattr(holder, f"{kind}_token_id", None) for kind in ("pad", "eos") for holder in (processor, config)]
        config.pad_token_id = next((token for token in named if isinstance(token, int) and token >= 0), 0)


def load_processor(path: Path, remote: bool = False) -> Any:
    """The folder's tokenizer or processor; None where it has none, or one that needs libraries which are not there.

    Raises:
        InputError: its files do not read.
    """
    if not any((path / name).is_file() for name in (*_PROCESSOR_FILES, *_VOCABULARIES)):
        return None
    try:
        return AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=remote)
    except ImportError:
        return None  # Images and sound need libraries that the graph does without; text needs none.
    except Exception as error:
        # Tokenizer and processor files are free-form too.
        raise InputError(
            f"{path}: its tokenizer or processor does not load ({one_line(error)}); copy its files again"
        ) from error
