"""A text encoder with pooling and the layers of a head after it, which returns scores of texts or pairs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from compressor.models.dense_layer import DenseLayer, NormLayer
from compressor.models.pooling import POOLINGS
from compressor.models.sentence_encoder import STATES

LOGITS = "logits"

HeadLayer = DenseLayer | NormLayer
"""A layer of a head."""


class ModuleReranker(PreTrainedModel):
    """An encoder of transformers, pooling and a head, as in a folder of sentence-transformers' `CrossEncoder`.

    The library's ONNX and OpenVINO backends read the output `last_hidden_state`, and run all other modules on it. Where
    the graph pools, that output holds the pooled states as a sequence of one state, which no pooling changes.

    Args:
        encoder: its first output is the states of the tokens, `[rows, positions, width]`. Its configuration gets as
            many labels as there are scores.
        pooling: a name in `compressor.models.pooling.POOLINGS`.
        layers: the layers that pooled states pass, in order; the last one's outputs are the scores.
        folders: the folders of the layers in that of the model.
        pool_in_graph: whether the states of an exported graph are pooled.
    """

    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(
        self,
        encoder: PreTrainedModel,
        pooling: str,
        layers: Sequence[HeadLayer],
        folders: Sequence[str],
        *,
        pool_in_graph: bool = True,
    ) -> None:
        super().__init__(encoder.config)
        self._supports_sdpa = encoder._supports_sdpa
        self.encoder, self.head = encoder, nn.Sequential(*layers)
        self.pooling, self.folders, self.pool_in_graph = pooling, tuple(folders), pool_in_graph
        self._takes_types, self._takes_cache = (
            name in inspect.signature(encoder.forward).parameters for name in ("token_type_ids", "use_cache")
        )

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
        mask = input_ids.new_ones(input_ids.shape) if attention_mask is None else attention_mask
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
        if token_type_ids is not None and self._takes_types:
            arguments["token_type_ids"] = token_type_ids
        if self._takes_cache:
            arguments["use_cache"] = False
        if output_hidden_states:
            arguments["output_hidden_states"] = True
        output = self.encoder(**arguments)
        states = output[0]
        pooled = POOLINGS[self.pooling](states, mask)
        logits = self.score(pooled)
        values: dict[str, Any] = {LOGITS: logits, STATES: pooled[:, None] if self.pool_in_graph else states}
        if labels is not None:
            values = {"loss": _loss(logits, labels), **values}
        if output_hidden_states:
            values["hidden_states"] = output.hidden_states
        return ModelOutput(values)

    def score(self, pooled: Tensor) -> Tensor:
        """Scores `[rows, scores]` from pooled states `[rows, width]`."""
        logits: Tensor = self.head(pooled)
        return logits

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write weights and configuration of the encoder, as in the folder that it was loaded from."""
        self.encoder.save_pretrained(save_directory, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of classes, else the squared error of numbers."""
    if labels.is_floating_point():
        return nn.functional.mse_loss(logits.reshape(labels.shape), labels)
    return nn.functional.cross_entropy(logits, labels)
