"""Tiny models with the signature of a bare graph, and files of arrays for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.graph.signature import InputSpec, OutputSpec
from compressor.model_folder import ModelFolder

WIDTH, VOCABULARY = 6, 20
INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
TEXT_INPUTS = {name: InputSpec(INT64, (None, None)) for name in ("input_ids", "attention_mask")}
IMAGE_INPUTS = {"image": InputSpec(FLOAT32, (None, 2, 4))}
OUTPUTS: dict[str, tuple[int | None, ...]] = {
    "logits": (None, 3),
    "tags_logits": (None, None, 4),
    "score": (None, 1),
    "rank": (None,),
    "embedding": (None, WIDTH),
    "last_hidden_state": (None, None, WIDTH),
    "start_logits": (None, None),
    "end_logits": (None, None),
}
"""Outputs that the model computes, with their axes."""


class GraphModel(PreTrainedModel):
    """Tokens are embedded, mixed with the mean of the row, and projected to each output.

    Args:
        inputs: the inputs.
        outputs: names of outputs, in order.
        renamed: names under which some are returned.
    """

    config_class = PretrainedConfig

    def __init__(
        self, inputs: Mapping[str, InputSpec], outputs: Sequence[str], renamed: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(PretrainedConfig())
        self.input_specs, self._names = dict(inputs), {name: (renamed or {}).get(name, name) for name in outputs}
        self.output_specs = {
            self._names[name]: OutputSpec(INT64 if name == "ids" else FLOAT32, OUTPUTS.get(name, (None, 3)))
            for name in outputs
        }
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.pixels = nn.Linear(8, WIDTH)
        heads = {name: OUTPUTS.get(name, (None, 3))[-1] or 1 for name in outputs}
        heads["rank"] = 1
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, size) for name, size in heads.items()})

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, image: Tensor | None = None
    ) -> dict[str, Tensor]:
        if input_ids is None:
            assert image is not None
            pooled = self.pixels(image.flatten(1)).tanh()
            states = pooled[:, None]
        else:
            embedded = self.embedding(input_ids)
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            pooled = (embedded * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            states = embedded + pooled[:, None]
        values = {}
        for name, returned in self._names.items():
            axes = len(OUTPUTS.get(name, (None, 3)))
            by_position = OUTPUTS.get(name, (None, 3))[1:2] == (None,)
            value = self.heads[name](states if by_position else pooled)
            values[returned] = value.squeeze(-1) if axes < value.dim() else value
        return values


def graph(*outputs: str, inputs: Mapping[str, InputSpec] = TEXT_INPUTS, **renamed: str) -> ModelFolder:
    """The folder of a graph with these outputs."""
    torch.manual_seed(0)
    model = GraphModel(inputs, outputs, renamed).eval()
    for head in model.heads.values():
        assert isinstance(head, nn.Linear)
        nn.init.normal_(head.weight)
    return ModelFolder(Path("model.onnx"), model, None, model.config, "sha256:0", "arrays", "graph")


def text_rows(rows: int = 40, positions: int = 9, seed: int = 0) -> dict[str, np.ndarray]:
    """Ids and masks of rows of 2 to 7 tokens, padded on the right."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(positions) < rng.integers(2, 8, rows)[:, None]).astype(np.int64)
    return {"input_ids": rng.integers(1, VOCABULARY, (rows, positions)) * mask, "attention_mask": mask}


def image_rows(rows: int = 40) -> dict[str, np.ndarray]:
    """Images."""
    return {"image": np.random.default_rng(0).standard_normal((rows, 2, 4)).astype(np.float32)}


def npz(path: Path, arrays: Mapping[str, Any]) -> str:
    """Write a file of arrays; return its path."""
    np.savez(path, **arrays)
    return str(path)
