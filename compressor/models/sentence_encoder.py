"""A text encoder with pooling and, possibly, dense layers, which returns one embedding per text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.models.pooled_encoder import POOLINGS, DenseLayer, PooledEncoder

EMBEDDING, STATES, RANKING = "sentence_embedding", "last_hidden_state", "document_scores"
"""Names of outputs of `SentenceEncoder`."""
_SCALE = 20.0
"""Factor on cosines before a softmax, as in sentence-transformers' losses of rankings."""


class SentenceEncoder(PooledEncoder):
    """A pooled encoder, dense layers and normalisation, as in a folder of sentence-transformers.

    Args:
        encoder: its first output is the states of the tokens, `[texts, positions, width]`.
        pooling: a name in `compressor.models.pooled_encoder.POOLINGS`.
        normalize: whether embeddings have norm one.
        pool_in_graph: whether an exported graph pools.

    Attributes:
        dense: the `DenseLayer`s after the pooling, in order; empty until the caller appends some.
        documents: embeddings `[documents, width]` of norm one, which texts are compared with; None: no scores of
            documents are computed.
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
        """The layers after the pooling, in order."""
        return [layer for layer in self.dense if isinstance(layer, DenseLayer)]

    @property
    def states_output(self) -> str:
        """Name of the output of an exported graph that has the states of tokens."""
        return STATES

    @property
    def graph_outputs(self) -> tuple[str, ...]:
        """Names of the outputs of an exported graph."""
        return (EMBEDDING, STATES) if self.pool_in_graph else (STATES,)

    def outputs(self, pooled: Tensor) -> dict[str, Tensor]:
        """Embeddings `[texts, width]`, and scores of documents, where the model has some."""
        return self.with_documents(self._embed(pooled))

    def with_documents(self, embedding: Tensor) -> dict[str, Tensor]:
        """Outputs for embeddings `[texts, width]`."""
        if self.documents is None:
            return {EMBEDDING: embedding}
        cosines = nn.functional.normalize(embedding, dim=-1) @ self.documents.to(embedding).T
        return {EMBEDDING: embedding, RANKING: _SCALE * cosines}

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """The ranking loss of embeddings of pairs.

        Args:
            output: `[texts, width]`; texts 2i and 2i+1 are pair i.
            labels: `[pairs]`, larger for more similar texts.
        """
        return _ranking_loss(output, labels)

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Embeddings `[texts, width]` from the states of tokens `[texts, positions, width]` and their mask."""
        return self._embed(POOLINGS[self.pooling](states, mask))

    def _embed(self, pooled: Tensor) -> Tensor:
        """Embeddings `[texts, width]` from pooled states `[texts, width of states]`."""
        embedding: Tensor = self.dense(pooled)
        return nn.functional.normalize(embedding, dim=-1) if self.normalize else embedding


def _ranking_loss(embedding: Tensor, labels: Tensor) -> Tensor:
    """log(1 + sum of exp(20 (cos_j - cos_i)) over label_i > label_j) of the cosines of pairs.

    The loss depends on the order of the labels alone, so that labels may have any scale (CoSENT: Su 2022; `CoSENTLoss`
    in sentence-transformers). It is zero for single texts, which have no order.
    """
    if len(embedding) != 2 * len(labels):
        return embedding.new_zeros(())
    first, second = embedding.unflatten(0, (-1, 2)).unbind(1)
    cosines = _SCALE * nn.functional.cosine_similarity(first, second)
    differences = cosines[None, :] - cosines[:, None]
    ordered = labels[:, None] > labels[None, :]
    return torch.cat([differences.new_zeros(1), differences[ordered]]).logsumexp(0)
