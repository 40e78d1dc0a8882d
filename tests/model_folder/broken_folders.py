"""Model folders with adapters, heads, further files and names of tensors that are not those of `save_pretrained`."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.errors import ErrorCode
from compressor.results import NoteCode
from tests import folders
from tests.model_folder.edits import edit_config, edit_weights

WEIGHTS, ADAPTER, ADAPTER_CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Readable:
    """A folder that is read.

    Attributes:
        folder: the folder.
        reference: the model whose outputs it has, which was made without the code that is tested.
        notes: the codes of the notes.
        named: names of files that the notes have.
        copied: files that are in the output folder.
    """

    folder: Path
    reference: nn.Module
    notes: tuple[NoteCode, ...] = ()
    named: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A folder that is refused by one line.

    Attributes:
        folder: the folder.
        code: the code of the error.
        file: the file or folder that it names.
    """

    folder: Path
    code: ErrorCode
    file: Path


Case = Callable[[Path], Readable | Refused]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def spread(model: nn.Module) -> nn.Module:
    """The model with weights that are far from zero, where they may be trained."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def base_model(**fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = spread(folders.bert(**fields))
    assert isinstance(model, PreTrainedModel)
    return model


def save_base(path: Path, **fields: Any) -> Path:
    return folders.save(base_model(**fields), path)


def add_adapter(path: Path, base: Path, config: Any, cls: Any = hf.BertForSequenceClassification, **fields: Any) -> Any:
    """Save an adapter of random weights for a base; return the model with it."""
    import peft

    # Without the adapters that transformers itself loads from the folder.
    torch.manual_seed(1)
    model = cls.from_pretrained(base, adapter_kwargs={"subfolder": "none"}, **fields)
    adapted: Any = spread(peft.get_peft_model(model, config))
    for adapter in adapted.peft_config.values():
        adapter.base_model_name_or_path = str(base)
    adapted.save_pretrained(path)
    return adapted


def lora(**fields: Any) -> Any:
    import peft

    return peft.LoraConfig(**{"task_type": "SEQ_CLS", "target_modules": ["query", "value"], "r": 2, **fields})


def with_lora(path: Path, **fields: Any) -> tuple[Path, Any]:
    """A folder with an adapter, whose base is in another one."""
    base = save_base(path / "base")
    adapted = add_adapter(path / "adapter", base, lora(**fields))
    return path / "adapter", adapted


def set_adapter(folder: Path, **entries: Any) -> Path:
    """Set entries of the configuration of an adapter; return its path."""
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    return file


MERGED = (NoteCode.ADAPTER_MERGED,)


@case
def lora_beside_its_base(path: Path) -> Readable:
    base = save_base(path / "model")
    return Readable(base, add_adapter(base, base, lora()), MERGED, (ADAPTER_CONFIG,))


@case
def lora_alone(path: Path) -> Readable:
    folder, adapted = with_lora(path)
    return Readable(folder, adapted, MERGED, (ADAPTER_CONFIG,))


@case
def lora_with_a_relative_base(path: Path) -> Readable:
    folder, adapted = with_lora(path)
    set_adapter(folder, base_model_name_or_path="../base")
    return Readable(folder, adapted, MERGED)


@case
def lora_with_the_tokenizer_of_its_training(path: Path) -> Readable:
    folder, adapted = with_lora(path)
    shutil.move(path / "base" / "tokenizer.json", folder / "tokenizer.json")
    shutil.move(path / "base" / "tokenizer_config.json", folder / "tokenizer_config.json")
    return Readable(folder, adapted, MERGED, copied=("tokenizer.json", "config.json"))


@case
def lora_with_a_head_of_three_classes_on_an_encoder(path: Path) -> Readable:
    base = folders.save(spread(folders.bert_encoder()), path / "base")  # type: ignore[arg-type]
    return Readable(path / "adapter", add_adapter(path / "adapter", base, lora(), num_labels=3), MERGED)


@case
def lora_without_the_head_of_its_task(path: Path) -> Readable:
    folder, _ = with_lora(path, task_type=None)
    set_adapter(folder, task_type="SEQ_CLS")
    _, adapted = with_lora(path / "again", task_type=None)
    return Readable(folder, adapted, MERGED)


@case
def dora(path: Path) -> Readable:
    folder, adapted = with_lora(path, use_dora=True)
    return Readable(folder, adapted, MERGED)


@case
def lora_with_embeddings_that_are_saved_whole(path: Path) -> Readable:
    folder, adapted = with_lora(path, modules_to_save=["classifier", "word_embeddings"])
    return Readable(folder, adapted, MERGED)


@case
def scaled_activations(path: Path) -> Readable:
    import peft

    config = peft.IA3Config(task_type="SEQ_CLS", target_modules=["query", "value"], feedforward_modules=[])
    base = save_base(path / "base")
    return Readable(path / "adapter", add_adapter(path / "adapter", base, config), MERGED)


@case
def lora_of_a_language_model(path: Path) -> Readable:
    base = folders.save(spread(folders.gpt2()), path / "model")  # type: ignore[arg-type]
    config = lora(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    return Readable(base, add_adapter(base, base, config, hf.GPT2LMHeadModel), MERGED)


@case
def one_of_several_adapters(path: Path) -> Readable:
    base = save_base(path / "model")
    adapted = add_adapter(base / "formal", base, lora())
    add_adapter(base / "casual", base, lora(r=3))
    return Readable(base / "formal", adapted, (*MERGED, NoteCode.FILES_UNREAD), ("casual/",))


@case
def several_adapters(path: Path) -> Refused:
    base = save_base(path / "model")
    for name in ("formal", "casual"):
        add_adapter(base / name, base, lora())
    return Refused(base, ErrorCode.UNSUPPORTED_MODEL, base / "casual")


@case
def adapter_beside_others(path: Path) -> Readable:
    base = save_base(path / "model")
    adapted = add_adapter(base, base, lora())
    add_adapter(base / "casual", base, lora(r=3))
    return Readable(base, adapted, (*MERGED, NoteCode.FILES_UNREAD), ("casual/",))


@case
def checkpoints_of_a_training(path: Path) -> Readable:
    base = save_base(path / "model")
    adapted = add_adapter(base, base, lora())
    add_adapter(base / "checkpoint-10", base, lora())
    return Readable(base, adapted, MERGED)


@case
def lora_for_another_width(path: Path) -> Refused:
    folder, _ = with_lora(path)
    config = hf.BertConfig(**{**folders.SIZES, "hidden_size": 32})
    folders.save(hf.BertForSequenceClassification(config), path / "wide")
    file = set_adapter(folder, base_model_name_or_path=str(path / "wide"))
    return Refused(folder, ErrorCode.FILE_MISMATCH, file)


@case
def lora_for_more_layers(path: Path) -> Refused:
    config = hf.BertConfig(**{**folders.SIZES, "num_hidden_layers": 2})
    deep = folders.save(hf.BertForSequenceClassification(config), path / "deep")
    add_adapter(path / "adapter", deep, lora())
    set_adapter(path / "adapter", base_model_name_or_path=str(save_base(path / "base")))
    return Refused(path / "adapter", ErrorCode.FILE_MISMATCH, path / "adapter" / ADAPTER)


@case
def lora_for_another_family(path: Path) -> Refused:
    folder, _ = with_lora(path, task_type=None)
    file = set_adapter(folder, base_model_name_or_path=str(folders.save(folders.gpt2(), path / "other")))
    return Refused(folder, ErrorCode.FILE_MISMATCH, file)


@case
def base_on_a_hub(path: Path) -> Refused:
    folder, _ = with_lora(path)
    file = set_adapter(folder, base_model_name_or_path="google-bert/bert-base-uncased")
    return Refused(folder, ErrorCode.FILE_MISSING, file)


@case
def adapter_without_a_base(path: Path) -> Refused:
    folder, _ = with_lora(path)
    return Refused(folder, ErrorCode.FILE_MISSING, set_adapter(folder, base_model_name_or_path=None))


@case
def base_with_an_adapter_of_its_own(path: Path) -> Refused:
    folder, _ = with_lora(path)
    add_adapter(path / "base", path / "base", lora())
    return Refused(folder, ErrorCode.UNSUPPORTED_MODEL, folder / ADAPTER_CONFIG)


@case
def pickled_adapter(path: Path) -> Refused:
    folder, _ = with_lora(path)
    torch.save(load_file(folder / ADAPTER), folder / "adapter_model.bin")
    (folder / ADAPTER).unlink()
    return Refused(folder, ErrorCode.UNSAFE_CODE, folder / "adapter_model.bin")


@case
def adapter_without_weights(path: Path) -> Refused:
    folder, _ = with_lora(path)
    (folder / ADAPTER).unlink()
    return Refused(folder, ErrorCode.FILE_MISSING, folder / ADAPTER)


@case
def adapter_without_its_configuration(path: Path) -> Refused:
    base = save_base(path / "model")
    add_adapter(base, base, lora())
    (base / ADAPTER_CONFIG).unlink()
    return Refused(base, ErrorCode.FILE_MISSING, base / ADAPTER)


@case
def truncated_adapter(path: Path) -> Refused:
    folder, _ = with_lora(path)
    (folder / ADAPTER).write_bytes((folder / ADAPTER).read_bytes()[:-8])
    return Refused(folder, ErrorCode.FILE_UNREADABLE, folder / ADAPTER)


@case
def damaged_configuration_of_an_adapter(path: Path) -> Refused:
    folder, _ = with_lora(path)
    (folder / ADAPTER_CONFIG).write_text("{")
    return Refused(folder, ErrorCode.FILE_UNREADABLE, folder / ADAPTER_CONFIG)


@case
def adapter_of_another_library(path: Path) -> Refused:
    base = save_base(path / "model")
    (base / ADAPTER_CONFIG).write_text(json.dumps({"model_class": "BertAdapterModel", "name": "sentiment"}))
    return Refused(base, ErrorCode.FILE_UNREADABLE, base / ADAPTER_CONFIG)


@case
def adapter_of_an_unknown_method(path: Path) -> Refused:
    folder, _ = with_lora(path)
    return Refused(folder, ErrorCode.FILE_UNREADABLE, set_adapter(folder, peft_type="TELEPATHY"))


@case
def adapter_with_an_unknown_setting(path: Path) -> Refused:
    folder, _ = with_lora(path)
    return Refused(folder, ErrorCode.UNSUPPORTED, set_adapter(folder, rotation=3))


@case
def adapter_that_names_a_module_to_import(path: Path) -> Refused:
    folder, _ = with_lora(path)
    file = set_adapter(folder, megatron_config={"hidden_size": 16}, megatron_core="antigravity")
    return Refused(folder, ErrorCode.UNSUPPORTED_MODEL, file)


@case
def adapter_that_lacks_a_layer(path: Path) -> Refused:
    folder, _ = with_lora(path)
    tensors = load_file(folder / ADAPTER)
    save_file({name: tensor for name, tensor in tensors.items() if "query" not in name}, folder / ADAPTER)
    return Refused(folder, ErrorCode.FILE_MISMATCH, folder / ADAPTER)


@case
def adapter_that_lacks_its_head(path: Path) -> Refused:
    folder, _ = with_lora(path)
    tensors = load_file(folder / ADAPTER)
    save_file({name: tensor for name, tensor in tensors.items() if "classifier" not in name}, folder / ADAPTER)
    return Refused(folder, ErrorCode.FILE_MISMATCH, folder / ADAPTER_CONFIG)


@case
def adapter_that_diverged(path: Path) -> Refused:
    folder, _ = with_lora(path)
    tensors = load_file(folder / ADAPTER)
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    save_file(tensors, folder / ADAPTER)
    return Refused(folder, ErrorCode.NOT_FINITE, folder)


@case
def prefix_tuning(path: Path) -> Refused:
    import peft

    base = save_base(path / "base")
    add_adapter(path / "adapter", base, peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
    return Refused(path / "adapter", ErrorCode.UNSUPPORTED_MODEL, path / "adapter" / ADAPTER_CONFIG)


@case
def lora_of_embeddings_that_are_tied(path: Path) -> Refused:
    base = folders.save(spread(folders.gpt2()), path / "model")  # type: ignore[arg-type]
    add_adapter(base, base, lora(task_type="CAUSAL_LM", target_modules=["wte"]), hf.GPT2LMHeadModel)
    return Refused(base, ErrorCode.UNSUPPORTED_MODEL, base / ADAPTER_CONFIG)


@case
def head_of_setfit(path: Path) -> Readable:
    folder = folders.save_sentence_encoder(path / "model")
    (folder / "model_head.pkl").write_bytes(pickle.dumps({"coef_": [[1.0] * 16]}))
    (folder / "config_setfit.json").write_text(json.dumps({"labels": ["a", "b"]}))
    heads = ("model_head.pkl", "config_setfit.json")
    encoder = hf.BertModel.from_pretrained(folder).eval()
    return Readable(folder, encoder, (NoteCode.TENSORS_UNUSED, NoteCode.FILES_COPIED), heads, heads)


@case
def pickle_that_would_run_code(path: Path) -> Readable:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (path / "ran",)

    folder = save_base(path / "model")
    (folder / "scaler.pkl").write_bytes(pickle.dumps(Bomb()))
    return Readable(folder, base_model(), (NoteCode.FILES_UNREAD,), ("scaler.pkl",))


@case
def weights_that_nothing_names(path: Path) -> Readable:
    folder = save_base(path / "model")
    for name in ("value_head.safetensors", "model-00002-of-00002.safetensors"):
        save_file({"weight": torch.ones(2)}, folder / name)
    named = ("value_head.safetensors", "model-00002-of-00002.safetensors")
    return Readable(folder, base_model(), (NoteCode.FILES_UNREAD,), named)


@case
def dense_layer_that_no_list_reads(path: Path) -> Readable:
    folder = folders.save_sentence_encoder(path / "model")
    folders.save_dense_layer(folder / "2_Dense", 16, 8)
    encoder = hf.BertModel.from_pretrained(folder).eval()
    return Readable(folder, encoder, (NoteCode.TENSORS_UNUSED, NoteCode.FILES_UNREAD), ("2_Dense/",))


@case
def files_that_change_nothing(path: Path) -> Readable:
    folder = save_base(path / "model")
    names = "README.md .gitattributes training_args.bin optimizer.pt tf_model.h5 flax_model.msgpack pytorch_model.bin"
    for name in (*names.split(), "model.onnx", "trainer_state.json", "onnx/model.onnx", "openvino/model.xml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    return Readable(folder, base_model())


def _quantized(path: Path, method: str) -> Refused:
    folder = save_base(path / "model")
    edit_config(folder, quantization_config={"quant_method": method})
    return Refused(folder, ErrorCode.UNSUPPORTED_MODEL, folder / "config.json")


@case
def quantized_by_gptq(path: Path) -> Refused:
    return _quantized(path, "gptq")


@case
def quantized_by_bitsandbytes(path: Path) -> Refused:
    return _quantized(path, "bitsandbytes")


@case
def integers_without_a_word_on_them(path: Path) -> Refused:
    folder = save_base(path / "model")
    name = "bert.encoder.layer.0.attention.self.query.weight"
    edit_weights(folder, lambda weights: weights.update({name: (weights[name] * 50).to(torch.int8)}))
    return Refused(folder, ErrorCode.UNSUPPORTED_MODEL, folder / WEIGHTS)


def rename(folder: Path, name: Callable[[str], str]) -> None:
    """Rename the tensors of a folder."""

    def edit(weights: dict[str, Tensor]) -> None:
        tensors = {name(old): tensor for old, tensor in weights.items()}
        weights.clear()
        weights.update(tensors)

    edit_weights(folder, edit)


def _prefixed(name: Callable[[str], str]) -> Case:
    def make(path: Path) -> Readable:
        folder = save_base(path / "model")
        rename(folder, name)
        return Readable(folder, base_model(), (NoteCode.PREFIX_REMOVED,), (WEIGHTS,))

    return make


def _inside(wrapper: str) -> Callable[[str], str]:
    """Each layer is wrapped, but not the model."""
    return lambda name: re.sub(r"(layer\.\d+\.)", rf"\1{wrapper}", name)


CASES |= {
    "compiled": _prefixed("_orig_mod.{}".format),
    "parallel": _prefixed("module.{}".format),
    "parallel and compiled": _prefixed("module._orig_mod.{}".format),
    "attribute of another module": _prefixed("model.{}".format),
    "attribute of a compiled module": _prefixed("_orig_mod.network.{}".format),
    "compiled layers": _prefixed(_inside("_orig_mod.")),
    "sharded layers": _prefixed(_inside("_fsdp_wrapped_module.")),
    "checkpointed layers": _prefixed(_inside("_checkpoint_wrapped_module.")),
}


@case
def compiled_language_model(path: Path) -> Readable:
    model = spread(folders.gpt2())
    folder = folders.save(model, path / "model")  # type: ignore[arg-type]
    rename(folder, "_orig_mod.{}".format)
    return Readable(folder, model, (NoteCode.PREFIX_REMOVED,))


@case
def compiled_and_in_shards(path: Path) -> Readable:
    folder = save_base(path / "model")
    rename(folder, "_orig_mod.{}".format)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for shard in set(shards.values()):
        part = {name: tensor for name, tensor in tensors.items() if shards[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return Readable(folder, base_model(), (NoteCode.PREFIX_REMOVED,), (f"{WEIGHTS}.index.json",))


@case
def adapter_of_a_compiled_base(path: Path) -> Readable:
    folder, adapted = with_lora(path)
    rename(path / "base", "_orig_mod.{}".format)
    return Readable(folder, adapted, (*MERGED, NoteCode.PREFIX_REMOVED))


@case
def two_models_in_a_file(path: Path) -> Refused:
    folder = save_base(path / "model")

    def double(weights: dict[str, Tensor]) -> None:
        tensors = dict(weights)
        weights.clear()
        weights.update(
            {f"{role}.{name}": tensor.clone() for role in ("student", "teacher") for name, tensor in tensors.items()}
        )

    edit_weights(folder, double)
    return Refused(folder, ErrorCode.WEIGHTS_MISSING, folder / WEIGHTS)


@case
def compiled_without_a_head(path: Path) -> Refused:
    folder = save_base(path / "model")
    edit_weights(folder, lambda weights: weights.pop("classifier.bias"))
    rename(folder, "_orig_mod.{}".format)
    return Refused(folder, ErrorCode.WEIGHTS_MISSING, folder / WEIGHTS)


@case
def head_of_another_task(path: Path) -> Refused:
    folder = save_base(path / "model")
    tensors = folders.save(hf.BertForMaskedLM(hf.BertConfig(**folders.SIZES)), path / "other") / WEIGHTS
    shutil.copy(tensors, folder / WEIGHTS)
    return Refused(folder, ErrorCode.WEIGHTS_MISSING, folder / WEIGHTS)


@case
def weights_of_another_width(path: Path) -> Refused:
    folder = save_base(path / "model")
    edit_config(folder, hidden_size=32)
    return Refused(folder, ErrorCode.FILE_MISMATCH, folder / WEIGHTS)
