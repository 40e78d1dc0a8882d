"""The adapter of a model folder: small weights that peft trained for the weights of a base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.configuration import CONFIG, read_object
from compressor.model_folder.model_class import label_count
from compressor.model_folder.weight_checks import first_names, has_weights
from compressor.silence_libraries import one_line

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
"""What peft puts before the name of a tensor of the base."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of peft.

    Attributes:
        path: its folder.
        base: the folder of the weights that it changes, which may be the same.
        settings: the entries of its configuration.
        shapes: the shapes of its tensors by name.
    """

    path: Path
    base: Path
    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

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
        """The shapes of tensors of the base that it replaces, by their name there; those of its own are among them."""
        return {name.removeprefix(_WRAPPED): shape for name, shape in self.shapes.items()}

    @property
    def config_folder(self) -> Path:
        """The folder of the configuration of the model."""
        return self.path if (self.path / CONFIG).is_file() else self.base

    def fit_labels(self, cls: Any, config: PretrainedConfig) -> None:
        """Set the number of classes of a configuration to that of the head which the adapter brings."""
        if self.settings.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
            count = label_count(cls, config, self.whole)
            if count is not None and count != config.num_labels:
                config.num_labels = count


def find_adapter(path: Path, *, remote: bool = False) -> Adapter | None:
    """The adapter of a folder; None if it has none.

    Args:
        path: the folder.
        remote: whether the code of the folder runs, which then decides on adapters in folders inside.

    Raises:
        InputError: a file of the adapter is missing, damaged or pickled, its base is not on this machine, or the folder
            has adapters in folders inside, of which none is chosen.
    """
    file = path / ADAPTER_CONFIG
    if not file.is_file():
        _check_strays(path)
        if not remote:
            _check_inner(path)
        return None
    settings = read_object(file)
    if not isinstance(settings.get("peft_type"), str):
        raise InputError(
            f"{file}: has no peft_type and is not an adapter of peft; merge the adapter with the library that wrote it,"
            " and save the model as a whole",
            code=ErrorCode.FILE_UNREADABLE,
            path=file,
            field="peft_type",
        )
    shapes = _shapes(path)
    base = path if has_weights(path) else _base(file, settings)
    if base != path and (base / ADAPTER_CONFIG).is_file():
        raise InputError(
            f"{file}: its base {base} has an adapter of its own ({ADAPTER_CONFIG}), so one of them would have to follow"
            " the other; merge that one first (merge_and_unload), and name the folder of the result as"
            " base_model_name_or_path",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=file,
            field="base_model_name_or_path",
            value=str(base),
        )
    return Adapter(path, base, settings, shapes)


def source_folders(path: Path) -> tuple[Path, ...]:
    """The folders whose files a model folder is read from: its own, and that of the base of its adapter.

    Raises:
        InputError: the adapter cannot be used, see `find_adapter`.
    """
    adapter = find_adapter(path, remote=True)
    return (path,) if adapter is None or adapter.base == path else (path, adapter.base)


def _check_strays(path: Path) -> None:
    """Raise InputError for weights of an adapter without its configuration."""
    stray = next((name for name in (ADAPTER_WEIGHTS, _PICKLED) if (path / name).is_file()), None)
    if stray is not None:
        raise InputError(
            f"{path / stray}: the weights of an adapter, but there is no {ADAPTER_CONFIG} that says how they are added;"
            " copy it too, or move the file out of the folder to use the model without it",
            code=ErrorCode.FILE_MISSING,
            path=path / stray,
        )


def _check_inner(path: Path) -> None:
    """Raise InputError for adapters in the folders of a folder; checkpoints of a training are earlier states."""
    inner = sorted(file.parent.name for file in path.glob(f"*/{ADAPTER_CONFIG}"))
    names = [name for name in inner if not name.startswith("checkpoint-")]
    if names:
        raise InputError(
            f"{path}: has adapters in its folders {first_names(names)}, and nothing says which one is used; give that"
            f" folder as the model, e.g. {path / names[0]}, or move them out to use the model without them",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=path,
            adapters=tuple(names),
        )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of an adapter by name; raise InputError if they cannot be read."""
    file, pickled = path / ADAPTER_WEIGHTS, path / _PICKLED
    if not file.is_file() and pickled.is_file():
        code = f"save_file(torch.load('{pickled}', weights_only=True), '{file}')"
        raise InputError(
            f"{pickled}: reading pickled weights can run code; save them as {ADAPTER_WEIGHTS}: python -c"
            f' "import torch; from safetensors.torch import save_file; {code}"',
            code=ErrorCode.UNSAFE_CODE,
            path=pickled,
        )
    if not file.is_file():
        raise InputError(
            f"{file}: missing, but {ADAPTER_CONFIG} describes it; copy it too",
            code=ErrorCode.FILE_MISSING,
            path=file,
        )
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file}: is damaged or truncated ({one_line(error)}); copy or download it again",
            code=ErrorCode.FILE_UNREADABLE,
            path=file,
        ) from error


def _base(file: Path, settings: Mapping[str, Any]) -> Path:
    """The folder of the base of an adapter without weights beside it; raise InputError if it is not on this machine."""
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
    raise InputError(
        f"{file}: {problem}, and nothing is downloaded; write the base's folder into base_model_name_or_path, or merge"
        f' where it can be loaded, and copy the tokenizer to the result: python -c "{merging}"',
        code=ErrorCode.FILE_MISSING,
        path=file,
        field="base_model_name_or_path",
        value=name,
    )
