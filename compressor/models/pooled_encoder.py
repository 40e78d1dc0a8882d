"""What follows the encoder of sentence embeddings or of a reranker: pooling, and layers that map pooled states."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

Pooling = Callable[[Tensor, Tensor], Tensor]
"""Pools states `[texts, positions, width]` with a mask `[texts, positions]` (0: padding) to `[texts, width]`."""
ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    layer.__name__: layer for layer in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
}
"""The activations of a `DenseLayer` by the names of their classes."""


def _last(states: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (positions * mask.ne(0)).amax(1)
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)


def _sum(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask[..., None].to(states.dtype)).sum(1)


def _tokens(states: Tensor, mask: Tensor) -> Tensor:
    """The number of tokens of each text, `[texts, 1]`; at least 1e-9."""
    return mask.to(states.dtype).sum(1, keepdim=True).clamp(min=1e-9)


POOLINGS: Mapping[str, Pooling] = {
    "cls": lambda states, mask: states[:, 0],
    "lasttoken": _last,
    "max": lambda states, mask: states.masked_fill(mask.eq(0)[..., None], torch.finfo(states.dtype).min).amax(1),
    "mean": lambda states, mask: _sum(states, mask) / _tokens(states, mask),
    "mean_sqrt_len_tokens": lambda states, mask: _sum(states, mask) / _tokens(states, mask).sqrt(),
}
"""By the names of sentence-transformers. `cls` reads position 0, so texts must be padded on the right."""


class DenseLayer(nn.Module):
    """The module `Dense` of sentence-transformers: an affine map, an activation and, possibly, a residual connection.

    The weights are buffers: the layer is neither pruned nor trained.

    Args:
        weight: `[output width, input width]`.
        bias: `[output width]`; None: the layer has no bias.
        activation: a name in `ACTIVATIONS`.
        is_residual: whether the input is added to the output.
        residual: `[output width, input width]`, which maps that input; None: it is added as it is.
    """

    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        *,
        is_residual: bool = False,
        residual: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("residual", residual)
        self.activation, self.is_residual = activation, is_residual
        self._activate = ACTIVATIONS[activation]()

    @property
    def setting(self) -> str:
        """What the layer computes besides its weights."""
        return f"{self.activation} residual" if self.is_residual else self.activation

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map embeddings `[texts, input width]` to `[texts, output width]`."""
        mapped: Tensor = self._activate(nn.functional.linear(embeddings, self.weight, self.bias))
        if not self.is_residual:
            return mapped
        return mapped + (embeddings if self.residual is None else nn.functional.linear(embeddings, self.residual))


class NormLayer(nn.Module):
    """The module `LayerNorm` of sentence-transformers, whose weights are buffers like those of `DenseLayer`.

    Args:
        weight: `[width]`.
        bias: `[width]`.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @property
    def setting(self) -> str:
        """What the layer computes besides its weights."""
        return "LayerNorm"

    def forward(self, embeddings: Tensor) -> Tensor:
        """Normalise embeddings `[texts, width]`."""
        return nn.functional.layer_norm(embeddings, self.weight.shape, self.weight, self.bias)


@dataclass
class PooledOutput(ModelOutput):
    """Output of a `PooledEncoder`; what its class does not compute is None.

    Attributes:
        loss: the loss, if labels are given.
        sentence_embedding: embeddings of a `SentenceEncoder`, `[texts, width]`.
        document_scores: 20 times the cosine of each text and each of its documents, `[texts, documents]`.
        logits: scores of a reranker, `[texts, scores]`.
        last_hidden_state: `[texts, 1, width]`, the pooled states as the only state of their text, or `[texts,
            positions, width]`, the states of the tokens.
        hidden_states: `[texts, positions, width]` of the embeddings and of each layer, if requested.
    """

    loss: Tensor | None = None
    sentence_embedding: Tensor | None = None
    document_scores: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class PooledEncoder(PreTrainedModel):
    """An encoder of transformers and a pooling, the base class of models in folders of sentence-transformers.

    The library's ONNX and OpenVINO backends read the output `last_hidden_state`, and run all other modules on it. Where
    the graph pools, that output holds the pooled states as a sequence of one state, which no pooling changes.

    Args:
        encoder: its first output is the states of the tokens, `[texts, positions, width]`.
        pooling: a name in `POOLINGS`.
        pool_in_graph: whether an exported graph pools.
    """

    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, encoder: PreTrainedModel, pooling: str, *, pool_in_graph: bool) -> None:
        super().__init__(encoder.config)
        self._supports_sdpa = encoder._supports_sdpa
        self.encoder, self.pooling, self.pool_in_graph = encoder, pooling, pool_in_graph
        parameters = inspect.signature(encoder.forward).parameters
        self._takes_types, self._takes_cache = (name in parameters for name in ("token_type_ids", "use_cache"))

    @abstractmethod
    def outputs(self, pooled: Tensor) -> dict[str, Tensor]:
        """Fields of `PooledOutput` from pooled states `[texts, width]`; `loss` reads the first."""

    @abstractmethod
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss of the first of `outputs`."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> PooledOutput:
        """Run the encoder, pool its states, and compute what follows.

        Args:
            input_ids: `[texts, positions]`, padded on the right.
            attention_mask: `[texts, positions]`, 0 where a position is padding; None: no position is.
            token_type_ids: `[texts, positions]`, for encoders that read them.
            labels: if given, `loss` is computed.
            output_hidden_states: whether to return the states of every layer.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
        if token_type_ids is not None and self._takes_types:
            arguments["token_type_ids"] = token_type_ids
        if self._takes_cache:
            arguments["use_cache"] = False
        if output_hidden_states:
            arguments["output_hidden_states"] = True
        encoded = self.encoder(**arguments)
        pooled = POOLINGS[self.pooling](encoded[0], mask)
        outputs = self.outputs(pooled)
        return PooledOutput(
            loss=None if labels is None else self.loss(next(iter(outputs.values())), labels),
            last_hidden_state=pooled[:, None] if self.pool_in_graph else encoded[0],
            hidden_states=encoded.hidden_states if output_hidden_states else None,
            **outputs,
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write weights and configuration of the encoder, as in the folder that it was loaded from."""
        self.encoder.save_pretrained(save_directory, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()
