"""A text encoder with pooling and, possibly, dense layers, which returns one embedding per text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from compressor.models.pooled_encoder import POOLINGS, DenseLayer, PooledEncoder

EMBEDDING, STATES, RANKING = "sentence_embedding", "last_hidden_state", "document_scores"
"""Names of outputs of `SentenceEncoder`."""
_SCALE = 20.0
"""Factor on cosines before a softmax, as in sentence-transformers' losses of rankings."""


@dataclass
class SentenceOutput(ModelOutput):
    """Output of a `SentenceEncoder`.

    Attributes:
        loss: the loss of pairs, if labels are given.
        sentence_embedding: `[texts, width]`.
        document_scores: `[texts, documents]`, 20 times the cosine of each text and each document; None without
            documents.
        last_hidden_state: `[texts, 1, width]`, the pooled states as the only state of their text, or `[texts,
            positions, width]`, the states of the tokens; see `PooledEncoder`.
        hidden_states: `[texts, positions, width]` of the embeddings and of each layer, if requested.
    """

    loss: Tensor | None = None
    sentence_embedding: Tensor | None = None
    document_scores: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class SentenceEncoder(PooledEncoder):
    """A pooled encoder, dense layers and normalisation, as in a folder of sentence-transformers.

    Args:
        encoder: its first output is the states of the tokens, `[texts, positions, width]`.
        pooling: a name in `compressor.models.pooled_encoder.POOLINGS`.
        normalize: whether embeddings have norm one.
        pool_in_graph: whether an exported graph pools.

    Attributes:
        dense: the `DenseLayer`s that pooled states pass, in order; at first none.
        documents: embeddings `[documents, width]` of norm one, against which texts are ranked; None: there are none.
    """

    def __init__(
        self, encoder: PreTrainedModel, pooling: str, *, normalize: bool = True, pool_in_graph: bool = True
    ) -> None:
        super().__init__(encoder, pooling, pool_in_graph=pool_in_graph)
        self.dense, self.normalize = nn.Sequential(), normalize
        self.documents: Tensor | None = None

    @property
    def width(self) -> int:
        """The width of embeddings."""
        layers = self.dense_layers
        width: int = len(layers[-1].weight) if layers else self.encoder.config.get_text_config().hidden_size
        return width

    @property
    def settings(self) -> tuple[str, ...]:
        """What embeddings depend on besides weights and configuration."""
        return self.pooling, str(self.normalize), *(layer.setting for layer in self.dense_layers)

    @property
    def dense_layers(self) -> list[DenseLayer]:
        """The layers that pooled states pass, in order."""
        return [layer for layer in self.dense if isinstance(layer, DenseLayer)]

    @property
    def graph_outputs(self) -> tuple[str, ...]:
        """Names of the outputs of an exported graph."""
        return (EMBEDDING, STATES) if self.pool_in_graph else (STATES,)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> SentenceOutput:
        """Embed texts.

        Args:
            input_ids: `[texts, positions]`, padded on the right.
            attention_mask: `[texts, positions]`, 0 where a position is padding; None: there is none.
            token_type_ids: `[texts, positions]`, for encoders that read them.
            labels: `[pairs]`, larger for more similar texts, where texts 2i and 2i+1 are pair i; computes the loss.
            output_hidden_states: whether to return the states of every layer.
        """
        pooled, states, hidden_states = self.pooled_states(
            input_ids, attention_mask, token_type_ids, output_hidden_states
        )
        embedding, scores = self._embed(pooled), None
        if self.documents is not None:
            scores = _SCALE * nn.functional.normalize(embedding, dim=-1) @ self.documents.to(embedding).T
        return SentenceOutput(
            loss=None if labels is None else _ranking_loss(embedding, labels),
            sentence_embedding=embedding,
            last_hidden_state=states,
            document_scores=scores,
            hidden_states=hidden_states,
        )

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Embeddings `[texts, width]` from the states of tokens `[texts, positions, width]` and their mask."""
        return self._embed(POOLINGS[self.pooling](states, mask))

    def _embed(self, pooled: Tensor) -> Tensor:
        """Embeddings `[texts, width]` from pooled states `[texts, width of states]`."""
        embedding: Tensor = self.dense(pooled)
        return nn.functional.normalize(embedding, dim=-1) if self.normalize else embedding


def _ranking_loss(embedding: Tensor, labels: Tensor) -> Tensor:
    """The loss of the order of pairs by their cosines: log(1 + sum of exp(20 (cos_j - cos_i)) over label_i > label_j).

    It depends on the order of the labels alone, so that labels of any scale serve (CoSENT: Su 2022; `CoSENTLoss` in
    sentence-transformers). Single texts without a pair have no order, and no loss.
    """
    if len(embedding) != 2 * len(labels):
        return embedding.new_zeros(())
    first, second = embedding.unflatten(0, (-1, 2)).unbind(1)
    cosines = _SCALE * nn.functional.cosine_similarity(first, second)
    differences = cosines[None, :] - cosines[:, None]
    ordered = labels[:, None] > labels[None, :]
    return torch.cat([differences.new_zeros(1), differences[ordered]]).logsumexp(0)
