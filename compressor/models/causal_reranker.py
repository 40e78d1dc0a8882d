"""A language model that answers whether a document is relevant to a query: the logit of "yes" minus that of "no"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.models.module_reranker import LOGITS, ModuleReranker

_TOLERANCE = 1e-3
"""Largest error of a score, as a share of the largest logit."""


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
