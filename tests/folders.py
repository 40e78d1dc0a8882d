"""Tiny model folders on disk, with a tokenizer whose vocabulary is a few words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from compressor.config.sections import RowsConfig

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = "good bad film plot the a very not at all one two three four five six seven eight nine ten".split()


def rows_config(
    data: str | None = None, eval_data: str | None = None, test_data: str | None = None, **fields: Any
) -> RowsConfig:
    """The rows of a recipe, of at most 16 tokens unless `max_length` is given."""
    return RowsConfig(data=data, eval_data=eval_data, test_data=test_data, **{"max_length": 16, **fields})


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words separated by spaces, with the special tokens of BERT around one or two texts."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL_TOKENS, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


SIZES: dict[str, Any] = {
    "vocab_size": 25,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 20,
}
"""Configuration of the tiny BERT: one layer of two heads."""


def bert(**fields: Any) -> PreTrainedModel:
    """A BERT of one layer that classifies; with `num_labels=1` it is a regression."""
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **fields))


def tagger() -> PreTrainedModel:
    """A BERT of one layer that tags tokens with entities of one type."""
    return hf.BertForTokenClassification(hf.BertConfig(**SIZES, id2label=dict(enumerate(("O", "B-FILM", "I-FILM")))))


def bert_encoder() -> PreTrainedModel:
    """A BERT of one layer without a head."""
    return hf.BertModel(hf.BertConfig(**SIZES))


def gpt2(model_class: type = hf.GPT2LMHeadModel) -> PreTrainedModel:
    """A GPT-2 of one layer with the head of `model_class`."""
    return model_class(
        hf.GPT2Config(vocab_size=25, n_embd=16, n_layer=1, n_head=2, n_positions=20, bos_token_id=2, eos_token_id=3)
    )


def save(model: PreTrainedModel, path: Path, *, with_tokenizer: bool = True, half: bool = False) -> Path:
    """Write a model folder as transformers does; with `half` its weights are in half precision."""
    (model.half() if half else model).save_pretrained(path)
    model.float()
    if with_tokenizer:
        tokenizer().save_pretrained(path)
    return path


def save_sentence_encoder(
    path: Path, *, pooling: str = "mean", dense: Sequence[int] = (), normalize: bool = True, **settings: Any
) -> Path:
    """Write a folder of sentence-transformers with a random BERT encoder.

    Args:
        path: the folder.
        pooling: name of the pooling.
        dense: the width of each dense layer after the pooling.
        normalize: whether embeddings are normalized.
        settings: content of the library's own configurations, `sentence_bert_config` and
            `config_sentence_transformers`, and further keys `pooling_config` of the pooling's.
    """
    save(bert_encoder(), path)
    modules = ["Transformer", "Pooling", *("Dense" for _ in dense), *(["Normalize"] if normalize else [])]
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(modules[1:], 1))]
    library = "sentence_transformers.models"
    entries = [{"path": folder, "type": f"{library}.{name}"} for folder, name in zip(paths, modules, strict=True)]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Pooling").mkdir()
    config = {"embedding_dimension": 16, "pooling_mode": pooling, **settings.pop("pooling_config", {})}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    for folder, width, before in zip(paths[2:], dense, (16, *dense), strict=False):
        save_dense_layer(path / folder, before, width)
    for name, content in settings.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def save_dense_layer(path: Path, width: int, out_width: int, **config: Any) -> None:
    """Write a module `Dense` of sentence-transformers with random weights; `config` are further keys of its file."""
    path.mkdir(exist_ok=True)
    layer = torch.nn.Linear(width, out_width)
    keys = {"in_features": width, "out_features": out_width, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (path / "config.json").write_text(json.dumps({**keys, **activation, **config}))
    weights = {"linear.weight": layer.weight.detach(), "linear.bias": layer.bias.detach()}
    safetensors.torch.save_file(weights, path / "model.safetensors")
