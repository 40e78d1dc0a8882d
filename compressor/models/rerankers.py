"""Rerankers of sentence-transformers: an encoder with a head, and a language model that answers yes or no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from compressor.models.pooled_encoder import DenseLayer, NormLayer, PooledEncoder
from compressor.models.sentence_encoder import STATES

LOGITS = "logits"

HeadLayer = DenseLayer | NormLayer
"""A layer of a head."""
_TOLERANCE = 1e-3
"""Largest error of a score, as a share of the largest logit."""


class ModuleReranker(PooledEncoder):
    """A pooled encoder and a head, as in a folder of sentence-transformers' `CrossEncoder`.

    Args:
        encoder: its first output is the states of the tokens, `[rows, positions, width]`. Its configuration gets as
            many labels as there are scores.
        pooling: a name in `compressor.models.pooled_encoder.POOLINGS`.
        layers: the layers that pooled states pass, in order; the last one's outputs are the scores.
        folders: the folders of the layers in that of the model.
        pool_in_graph: whether the states of an exported graph are pooled.
    """

    def __init__(
        self,
        encoder: PreTrainedModel,
        pooling: str,
        layers: Sequence[HeadLayer],
        folders: Sequence[str],
        *,
        pool_in_graph: bool = True,
    ) -> None:
        super().__init__(encoder, pooling, pool_in_graph=pool_in_graph)
        self.head, self.folders = nn.Sequential(*layers), tuple(folders)

    @property
    def layers(self) -> list[HeadLayer]:
        """The layers that pooled states pass, in order."""
        return [layer for layer in self.head if isinstance(layer, HeadLayer)]

    @property
    def settings(self) -> tuple[str, ...]:
        """What scores depend on besides weights and configuration."""
        return self.pooling, *(layer.setting for layer in self.layers)

    @property
    def graph_outputs(self) -> tuple[str, ...]:
        """Names of the outputs of an exported graph."""
        return (LOGITS, STATES)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> ModelOutput:
        """Score texts or pairs.

        Args:
            input_ids: `[rows, positions]`, padded on the right.
            attention_mask: `[rows, positions]`, 0 where a position is padding; None: there is none.
            token_type_ids: `[rows, positions]`, for encoders that read them.
            labels: `[rows]`, or `[rows, scores]`; computes the loss that transformers' classifiers have.
            output_hidden_states: whether to return the states of every layer.

        Returns:
            `logits` `[rows, scores]`, `last_hidden_state` `[rows, 1, width]` or `[rows, positions, width]`, and `loss`
            and `hidden_states` where they are requested.
        """
        pooled, states, hidden_states = self.pooled_states(
            input_ids, attention_mask, token_type_ids, output_hidden_states
        )
        logits = self.score(pooled)
        values: dict[str, Any] = {LOGITS: logits, STATES: states}
        if labels is not None:
            numbers = labels.is_floating_point()
            loss = nn.functional.mse_loss if numbers else nn.functional.cross_entropy
            values = {"loss": loss(logits.reshape(labels.shape) if numbers else logits, labels), **values}
        if hidden_states is not None:
            values["hidden_states"] = hidden_states
        return ModelOutput(values)

    def score(self, pooled: Tensor) -> Tensor:
        """Scores `[rows, scores]` from pooled states `[rows, width]`."""
        logits: Tensor = self.head(pooled)
        return logits


@dataclass(frozen=True)
class Answers:
    """The answers of a language model to a pair, and how it reads one.

    Attributes:
        positive: the token of a relevant document, e.g. that of `yes`.
        negative: the token of another one, e.g. that of `no`; None: the score is the logit of `positive`.
        prompt: the system message of the chat template; empty: there is none.
        template: further arguments of the chat template.
    """

    positive: int
    negative: int | None
    prompt: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)


class CausalReranker(ModuleReranker):
    """The decoder of a language model, whose score of a row is a difference of two logits at its last token.

    The logits of other tokens are not computed. A module `LogitScore` of sentence-transformers names the two tokens.

    Args:
        whole: a language model whose logits are the product of its last states and its output embeddings.
        answers: the two tokens.

    Raises:
        ValueError: the logits of the model are not such a product.
    """

    rows: Tensor | None

    def __init__(self, whole: PreTrainedModel, answers: Answers) -> None:
        decoder = whole.get_decoder()
        super().__init__(decoder, "lasttoken", (), ())
        self.answers = answers
        head = whole.get_output_embeddings()
        is_tied = isinstance(head, nn.Linear) and head.weight is decoder.get_input_embeddings().weight
        # Tied embeddings may be trained: the head follows them.
        output_embeddings: Any = head.weight  # an attribute of a module has any type
        self.register_buffer("rows", None if is_tied else self._rows_of(output_embeddings.detach().float()).clone())
        object.__setattr__(self, "_whole", [whole])  # not a submodule: its parameters are those of the decoder
        _require_product(self, whole)

    @property
    def settings(self) -> tuple[str, ...]:
        """What scores depend on besides weights and configuration."""
        answers = self.answers
        return "answers", str(answers.positive), str(answers.negative), answers.prompt, repr(answers.template)

    def score(self, pooled: Tensor) -> Tensor:
        """Scores `[rows, 1]` from the states of last tokens `[rows, width]`."""
        embeddings: Any = self.encoder.get_input_embeddings()
        rows = self._rows_of(embeddings.weight) if self.rows is None else self.rows
        return pooled @ rows.to(pooled.dtype).T

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write weights and configuration of the language model, as in the folder that it was loaded from."""
        whole: list[PreTrainedModel] = self.__dict__["_whole"]
        whole[0].save_pretrained(save_directory, *args, **kwargs)

    def _rows_of(self, embeddings: Tensor) -> Tensor:
        """The vector `[1, width]` whose product with a state is its score, from output embeddings `[tokens, width]`."""
        positive, negative = self.answers.positive, self.answers.negative
        row = embeddings[positive : positive + 1]
        return row if negative is None else row - embeddings[negative : negative + 1]


def _require_product(model: CausalReranker, whole: PreTrainedModel) -> None:
    """Raise ValueError unless the scores of a row are those of the logits of the language model."""
    embeddings: Any = whole.get_input_embeddings()
    count = len(embeddings.weight)
    ids = torch.arange(8)[None] % count
    with torch.no_grad():
        logits = whole.eval()(input_ids=ids, use_cache=False).logits[:, -1]
        positive, negative = model.answers.positive, model.answers.negative
        expected = logits[:, positive] - (0 if negative is None else logits[:, negative])
        score = model.eval()(input_ids=ids)[LOGITS][:, 0]
    if not torch.allclose(score, expected, rtol=0, atol=_TOLERANCE * float(logits.abs().max())):
        raise ValueError("its logits are not the product of its last states and its output embeddings")
