"""Encoders with a pooling: sentence encoders, which return an embedding of a text, and rerankers, which score it.

A reranker of sentence-transformers is an encoder with a head, or a language model that answers yes or no.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from compressor.answers import EMBEDDING, RANKING, STATES

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
    """The module `LayerNorm` of sentence-transformers, with weights `[width]` in buffers like those of `DenseLayer`."""

    weight: Tensor
    bias: Tensor
    setting = "LayerNorm"
    """What the layer computes besides its weights."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

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


_SCALE = 20.0
"""Factor on cosines before a softmax, as in sentence-transformers' losses of rankings."""


class SentenceEncoder(PooledEncoder):
    """A pooled encoder, dense layers and normalisation to norm one, as in a folder of sentence-transformers.

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

    def pool(self, states: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Embeddings `[texts, width]` from the states of tokens `[texts, positions, width]` and their mask."""
        return self._embed(POOLINGS[self.pooling](torch.from_numpy(states).float(), torch.from_numpy(mask))).numpy()

    def _embed(self, pooled: Tensor) -> Tensor:
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


LOGITS = "logits"

HeadLayer = DenseLayer | NormLayer
"""A layer of a head."""
_TOLERANCE = 1e-3
"""Largest error of a score, as a share of the largest logit."""


class ModuleReranker(PooledEncoder):
    """A pooled encoder and a head, as in a folder of sentence-transformers' `CrossEncoder`.

    The configuration of the encoder has as many labels as there are scores.

    Args:
        layers: the layers after the pooling, in order; the outputs of the last are the scores.
        folders: paths of the layers' folders in the model's.
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
        head: Any = whole.get_output_embeddings()
        is_tied = isinstance(head, nn.Linear) and head.weight is decoder.get_input_embeddings().weight
        # Tied embeddings may be trained: the head follows them.
        self.register_buffer("rows", None if is_tied else self._score_weights(head.weight.detach().float()).clone())
        object.__setattr__(self, "_whole", [whole])  # not a submodule: its parameters are those of the decoder
        _require_matmul(self, whole)

    @property
    def settings(self) -> tuple[str, ...]:
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
    ids = torch.arange(8)[None] % len(embeddings.weight)
    with torch.no_grad():
        logits = whole.eval()(input_ids=ids, use_cache=False).logits[:, -1]
        positive, negative = model.answers.positive, model.answers.negative
        expected = logits[:, positive] - (0 if negative is None else logits[:, negative])
        score = model.eval()(input_ids=ids)[LOGITS][:, 0]
    if not torch.allclose(score, expected, rtol=0, atol=_TOLERANCE * float(logits.abs().max())):
        raise ValueError("its logits are not the matmul of its last states and its output embeddings")
