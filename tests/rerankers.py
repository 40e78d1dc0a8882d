"""Folders of rerankers as sentence-transformers writes them, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers as hf

from tests import folders

WIDTH = 16
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}the {{ m.content }} {% elif m.role == 'query' %}"
    "one {{ m.content }} {% elif m.role == 'document' %}two {{ m.content }} {% endif %}{% endfor %}"
    "three{% if add_generation_prompt %} four{% endif %}"
)
"""A chat template with the roles of a pair, whose marks are words of the vocabulary."""
_TYPES = {
    "Transformer": "base.modules.transformer",
    "Pooling": "sentence_transformer.modules.pooling",
    "Dense": "base.modules.dense",
    "LayerNorm": "sentence_transformer.modules.layer_norm",
    "Dropout": "sentence_transformer.modules.dropout",
    "LogitScore": "cross_encoder.modules.logit_score",
}
"""Class of a module -> its module in the library."""
POSITIVE, NEGATIVE = 5, 6
"""Tokens of the answers `good` and `bad`."""


def save_reranker(
    path: Path, *, pooling: str = "cls", residual: bool = False, outputs: int = 1, **library: Any
) -> Path:
    """Write a BERT with a pooling and a head of a dense layer, a normalisation and a dense layer.

    Args:
        path: the folder.
        pooling: name of the pooling.
        residual: whether the first dense layer has a residual connection.
        outputs: number of scores.
        library: further content of `config_sentence_transformers.json`.
    """
    folders.save(folders.bert_encoder(), path)
    names = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Dense")
    paths = ("", *(f"{number}_{name}" for number, name in enumerate(names[1:], 1)))
    _write_modules(path, dict(zip(paths, names, strict=True)))
    _write(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder", **library})
    _write(path / "1_Pooling" / "config.json", {"embedding_dimension": WIDTH, "pooling_mode": pooling})
    gelu = {"activation_function": "torch.nn.modules.activation.GELU", "use_residual": residual}
    folders.save_dense_layer(path / paths[2], WIDTH, WIDTH, **gelu)
    _write(path / paths[3] / "config.json", {"dimension": WIDTH})
    norm = {"norm.weight": torch.rand(WIDTH) + 0.5, "norm.bias": torch.randn(WIDTH)}
    safetensors.torch.save_file(norm, path / paths[3] / "model.safetensors")
    _write(path / paths[4] / "config.json", {"dropout": 0.2})
    identity = {"activation_function": "torch.nn.modules.linear.Identity", "module_output_name": "scores"}
    folders.save_dense_layer(path / paths[5], WIDTH, outputs, **identity)
    return path


def save_causal_reranker(path: Path, *, tied: bool = True, template: str | None = TEMPLATE, **library: Any) -> Path:
    """Write a language model with the module `LogitScore`.

    Args:
        path: the folder.
        tied: whether its output embeddings are those of its inputs.
        template: the chat template of the tokenizer; None: it has none.
        library: further content of `config_sentence_transformers.json`.
    """
    sizes = {key: value for key, value in folders.SIZES.items() if key != "max_position_embeddings"}
    config = hf.Qwen3Config(
        **sizes, num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied, pad_token_id=0
    )
    model = hf.Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    folders.save(model, path, with_tokenizer=False)
    tokenizer = folders.tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    _write_modules(path, {"": "Transformer", "1_LogitScore": "LogitScore"})
    _write(path / "1_LogitScore" / "config.json", {"true_token_id": POSITIVE, "false_token_id": NEGATIVE})
    _write(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder", **library})
    text = {"method": "forward", "method_output_name": "logits"}
    settings = {
        "transformer_task": "text-generation",
        "modality_config": {"text": text, "message": {**text, "format": "flat"}},
        "module_output_name": "causal_logits",
        "max_seq_length": 18,
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    _write(path / "sentence_bert_config.json", settings)
    return path


def _write_modules(path: Path, modules: dict[str, str]) -> None:
    """Write the classes of modules by the path of each in the folder."""
    entries = [
        {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.{_TYPES[name]}.{name}"}
        for number, (folder, name) in enumerate(modules.items())
    ]
    _write(path / "modules.json", entries)


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
