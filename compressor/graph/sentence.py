"""A graph that returns the states of tokens, with the modules of sentence-transformers that make embeddings of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from compressor.answers import EMBEDDING
from compressor.graph.config import GraphConfig
from compressor.graph.file import GraphFile
from compressor.graph.network import GraphNetwork, network_of
from compressor.graph.program import Program
from compressor.model_folder.sentence_modules import SentenceModules, save_module_layers
from compressor.models.pooled_encoder import POOLINGS, PooledOutput, SentenceEncoder

_LAYERS = "dense."
"""Prefix of the names of weights outside the graph."""


class SentenceFile(GraphFile):
    """The graph of a file with the modules around it, which PyTorch runs.

    Args:
        program: the graph.
        config: what tasks read of it.
        modules: the modules.
        folder: their folder.
        processor: the tokenizer, which gets the maximum length of the folder.
    """

    def __init__(
        self, program: Program, config: GraphConfig, modules: SentenceModules, folder: Path, processor: Any
    ) -> None:
        super().__init__(program, config)
        self._modules, self._folder, self._processor = modules, folder, processor
        self.encoder: Any = self.network

    @property
    def states_output(self) -> str:
        """Name of the output with the states of tokens."""
        return str(self.encoder.states_output)

    @property
    def documents(self) -> Tensor | None:
        """Embeddings of documents that texts are ranked against, `[documents, width]`."""
        documents: Tensor | None = self.encoder.documents
        return documents

    def pool(self, states: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Embeddings `[texts, width]` of the states of tokens, `[texts, positions, width]`."""
        return np.asarray(self.encoder.pool(states, mask))

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that embeddings depend on."""
        return tuple(self.encoder.settings)

    def _make_network(self) -> GraphNetwork:
        encoder = network_of(self._program, self.config, SentenceGraph, modules=self._modules)
        return self._modules.complete(self._folder, encoder, self._processor)

    @property
    def _runs_network(self) -> bool:
        return True

    def state(self) -> dict[str, np.ndarray]:
        network: Any = self.network
        layers = network.dense.state_dict()
        return {**super().state(), **{_LAYERS + name: value.detach().cpu().numpy() for name, value in layers.items()}}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        layers = {name: values for name, values in state.items() if name.startswith(_LAYERS)}
        super().load_state({name: values for name, values in state.items() if name not in layers})
        if layers:
            tensors = {name.removeprefix(_LAYERS): torch.from_numpy(values) for name, values in layers.items()}
            network: Any = self.network
            network.dense.load_state_dict(tensors)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(super().fingerprint().encode())
        for name, values in self.state().items():
            if name.startswith(_LAYERS):
                digest.update(np.ascontiguousarray(values).data)
        return f"sha256:{digest.hexdigest()}"

    def save_layers(self, folder: Any, out: Path) -> None:
        save_module_layers(self.network, self._modules, out)


class SentenceGraph(GraphNetwork, SentenceEncoder):
    """A graph that returns the states of the tokens, with the modules that make embeddings of them.

    The graph stays as it is: embeddings are computed from its outputs, as the library does, unless the graph has an
    output of embeddings, as sentence-transformers exports it.
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
        ranked = (name for name, output in self.output_specs.items() if len(output.shape) == 3)
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
