"""Models of the reconstruction tests: the zoo, models that call one layer several times, and heads of several tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compressor.units.layers import outermost_layers
from tests.zoo import FAMILIES, VOCABULARY, Case, text

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 44}


def initialised(model: PreTrainedModel) -> PreTrainedModel:
    """The model with random weights that are large enough for each of its parts to matter."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.eval()


def albert() -> Case:
    """Three calls of one layer."""
    config = hf.AlbertConfig(vocab_size=VOCABULARY, embedding_size=20, max_position_embeddings=70, **SIZES)
    return initialised(hf.AlbertForSequenceClassification(config)), text()


def shared_llama() -> Case:
    """Three calls of one pre-norm layer: its sum is read by the layer itself, and at last by the final norm."""
    model, inputs = FAMILIES["llama"](0)
    model.model.layers = nn.ModuleList([model.get_submodule("model.layers.0")] * 3)
    model.config.use_cache = False  # the calls would share the cache of one layer
    return model, inputs


def bert(classes: int) -> PreTrainedModel:
    """A classifier; a regression if there is one class."""
    sizes: dict[str, Any] = {**SIZES, "num_labels": classes}
    config = hf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=70, **sizes)
    return initialised(hf.BertForSequenceClassification(config))


def bert_spans() -> PreTrainedModel:
    """Start and end logits."""
    return initialised(hf.BertForQuestionAnswering(hf.BertConfig(vocab_size=VOCABULARY, **SIZES)))


def with_more_padding(batch: dict[str, Tensor], positions: int = 3) -> dict[str, Tensor]:
    """The batch with further padded positions, whose ids are not constant."""
    rows = len(batch["input_ids"])
    ids = torch.arange(rows * positions).reshape(rows, positions) % 50 + 5
    zeros = torch.zeros(rows, positions, dtype=torch.int64)
    return {
        "input_ids": torch.cat([batch["input_ids"], ids], 1),
        "attention_mask": torch.cat([batch["attention_mask"], zeros], 1),
    }


def linears_in_layers(model: PreTrainedModel) -> list[str]:
    """Module paths of all linears inside layers."""
    inside = {module for layer in outermost_layers(model) for module in layer.modules()}
    return [
        name for name, module in model.named_modules() if module in inside and isinstance(module, nn.Linear | Conv1D)
    ]


CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda make=make: make(0) for name, make in FAMILIES.items()},  # type: ignore[misc]
    "albert": albert,
    "shared_llama": shared_llama,
}
