"""Rerankers of sentence-transformers: an encoder with a head, and a language model that answers yes or no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
        encoder: its first output is the states of the tokens, `[texts, positions, width]`. Its configuration has as
            many labels as there are scores.
        pooling: a name in `compressor.models.pooled_encoder.POOLINGS`.
        layers: the layers after the pooling, in order; the outputs of the last are the scores.
        folders: paths of the layers' folders in the model's.
        pool_in_graph: whether an exported graph pools.
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
        """The layers after the pooling, in order."""
        return [layer for layer in self.head if isinstance(layer, HeadLayer)]

    @property
    def settings(self) -> tuple[str, ...]:
        """What scores depend on besides weights and configuration."""
        return self.pooling, *(layer.setting for layer in self.layers)

    @property
    def graph_outputs(self) -> tuple[str, ...]:
        """Names of the outputs of an exported graph."""
        return (LOGITS, STATES)

    def outputs(self, pooled: Tensor) -> dict[str, Tensor]:
        """Scores `[texts, scores]` as logits."""
        return {LOGITS: self.head(pooled)}

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss of transformers' classifiers: squared errors of numbers, cross-entropy of classes.

        Args:
            output: logits, `[texts, scores]`.
            labels: numbers `[texts]` or `[texts, scores]`, or classes `[texts]`.
        """
        if labels.is_floating_point():
            return nn.functional.mse_loss(output.reshape(labels.shape), labels)
        return nn.functional.cross_entropy(output, labels)


@dataclass(frozen=True)
class Answers:
    """The answers of a language model to a pair, and how it reads one.

    Attributes:
        positive: the token that says that a document is relevant, e.g. `yes`.
        negative: the token that says that it is not, e.g. `no`; None: the score is the logit of `positive`.
        prompt: the system message of the chat template; empty: no such message.
        template: further arguments of the chat template.
    """

    positive: int
    negative: int | None
    prompt: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)


class CausalReranker(ModuleReranker):
    """The decoder of a language model, which scores a text by the difference of two logits at its last token.

    No other logits are computed. A module `LogitScore` of sentence-transformers names the two tokens.

    Args:
        whole: a language model whose logits are the matmul of its last states and its output embeddings.
        answers: the two tokens.

    Raises:
        ValueError: its logits are something else.
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
        self.register_buffer(
            "rows", None if is_tied else self._score_weights(output_embeddings.detach().float()).clone()
        )
        object.__setattr__(self, "_whole", [whole])  # not a submodule: its parameters are those of the decoder
        _require_matmul(self, whole)

    @property
    def settings(self) -> tuple[str, ...]:
        """What scores depend on besides weights and configuration."""
        answers = self.answers
        return "answers", str(answers.positive), str(answers.negative), answers.prompt, repr(answers.template)

    def outputs(self, pooled: Tensor) -> dict[str, Tensor]:
        """Scores `[texts, 1]` as logits."""
        embeddings: Any = self.encoder.get_input_embeddings()
        rows = self._score_weights(embeddings.weight) if self.rows is None else self.rows
        return {LOGITS: pooled @ rows.to(pooled.dtype).T}

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write weights and configuration of the language model, as in the folder that it was loaded from."""
        whole: list[PreTrainedModel] = self.__dict__["_whole"]
        whole[0].save_pretrained(save_directory, *args, **kwargs)

    def _score_weights(self, embeddings: Tensor) -> Tensor:
        """Weights `[1, width]` of the score of a state, from output embeddings `[tokens, width]`."""
        positive, negative = self.answers.positive, self.answers.negative
        row = embeddings[positive : positive + 1]
        return row if negative is None else row - embeddings[negative : negative + 1]


def _require_matmul(model: CausalReranker, whole: PreTrainedModel) -> None:
    """Raise ValueError unless scores are differences of the language model's logits."""
    embeddings: Any = whole.get_input_embeddings()
    count = len(embeddings.weight)
    ids = torch.arange(8)[None] % count
    with torch.no_grad():
        logits = whole.eval()(input_ids=ids, use_cache=False).logits[:, -1]
        positive, negative = model.answers.positive, model.answers.negative
        expected = logits[:, positive] - (0 if negative is None else logits[:, negative])
        score = model.eval()(input_ids=ids)[LOGITS][:, 0]
    if not torch.allclose(score, expected, rtol=0, atol=_TOLERANCE * float(logits.abs().max())):
        raise ValueError("its logits are not the matmul of its last states and its output embeddings")
