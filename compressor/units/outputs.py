"""Which outputs of a model an exported graph keeps."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_BY_PRODUCTS = (
    "past_key_values",
    "memories",
    "mems",
    "hidden_states",
    "attentions",
    "encoder_",
    "decoder_",
    "cross_attentions",
)
"""Prefixes of outputs that no task reads: caches, outputs of `output_*` flags, and encoder states of a decoder model.

A model that receives memories by name returns the new ones as `new_memory_...`; these outputs remain.
"""


def kept_outputs(model: nn.Module, outputs: Iterable[str]) -> list[str]:
    """The names among `outputs` that the graph of a model keeps: those that the model lists, or that a task may read.

    All of them if no task reads any.

    Args:
        model: the model; a model of this project may list the outputs of its graph as `graph_outputs`.
        outputs: names of the tensors that its forward returns, as the exporter of transformers names them.
    """
    names: tuple[str, ...] | None = getattr(model, "graph_outputs", None)
    outputs = list(outputs)
    kept = [name for name in outputs if (name in names if names is not None else not _is_by_product(name))]
    return kept or outputs


def _is_by_product(output: str) -> bool:
    """Whether no task reads an output: one of `_BY_PRODUCTS`, or a part of an output that is no tensor itself.

    CLIP returns the outputs of its towers too, whose parts the exporter names `text_model_output.pooler_output`.
    """
    return output.startswith(_BY_PRODUCTS) or "." in output
