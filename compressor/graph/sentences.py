"""A graph that returns the states of tokens, with the pooling of a folder of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from compressor.graph.network import GraphNetwork
from compressor.graph.program import Program
from compressor.model_folder.sentence_modules import SentenceModules
from compressor.models.pooled_encoder import EMBEDDING, POOLINGS, PooledOutput, SentenceEncoder

_STATES_RANK = 3


class SentenceGraph(GraphNetwork, SentenceEncoder):
    """A graph that returns the states of the tokens, and what a folder computes from them.

    The graph stays as it is: embeddings are computed from its outputs, as the library does, unless the graph has an
    output of embeddings, as sentence-transformers exports it.

    Args:
        config: the configuration.
        program: the graph.
        modules: the modules of the folder.
    """

    def __init__(self, config: PretrainedConfig, program: Program, modules: SentenceModules) -> None:
        GraphNetwork.__init__(self, config, program)
        self.dense, self.normalize, self.documents = nn.Sequential(), modules.normalize, None
        self.pooling, self.pool_in_graph = modules.pooling, False

    @property
    def encoder(self) -> Self:  # type: ignore[override]
        """The graph is its own encoder."""
        return self

    @property
    def states_output(self) -> str:
        """Name of the first output `[texts, positions, width]`, else of the first output."""
        ranked = (name for name, output in self.output_specs.items() if len(output.shape) == _STATES_RANK)
        return next(ranked, next(iter(self.output_specs)))

    def answer(self, inputs: Mapping[str, Tensor], labels: Tensor | None) -> ModelOutput:
        computed = self.compute(inputs)
        states = computed[self.states_output]
        if EMBEDDING in computed:
            outputs = self.with_documents(computed[EMBEDDING])
        else:
            mask = inputs.get("attention_mask")
            mask = torch.ones(states.shape[:2], device=states.device) if mask is None else mask
            outputs = self.outputs(POOLINGS[self.pooling](states, mask))
        loss = None if labels is None else self.loss(outputs[EMBEDDING], labels)
        return PooledOutput(loss=loss, last_hidden_state=states, **outputs)  # type: ignore[arg-type]
