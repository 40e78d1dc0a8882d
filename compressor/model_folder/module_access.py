"""What a run reads and changes of a model of PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors

from compressor.config.values import GroupBy
from compressor.errors import CompressorError
from compressor.graph.signature import GeneratingForward
from compressor.model_folder.access import Forward, ModelAccess, Outputs
from compressor.model_folder.examples import make_module_inputs
from compressor.model_folder.fingerprints import fingerprint
from compressor.model_folder.sentence_modules import save_module_layers
from compressor.models.forward_changes import copy_of
from compressor.models.forwards import forward_arguments
from compressor.processes import on_accelerator
from compressor.targets.base import Feeds
from compressor.units import PrunableGroup, Site, expert_weights, find_groups
from compressor.units.find import find_units, no_heads_error
from compressor.units.hook import unwrap
from compressor.units.layers import linear_at, linear_weight
from compressor.units.prunable import Attention, LinearWeights


class ModuleAccess(ModelAccess):
    """A model of transformers, bare or wrapped for training."""

    exporter: ClassVar[str] = "compressor.engines.export_module"
    cached_exporter: ClassVar[str] = "compressor.generation.export_module"

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)

    @property
    def config(self) -> Any:
        return self._model.config

    @property
    def generates(self) -> bool:  # type: ignore[override]
        return bool(self._model.can_generate())

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self._model.forward).parameters)

    @property
    def network(self) -> PreTrainedModel:
        return self._model

    @property
    def table_size(self) -> int | None:
        table = next((module for module in self._model.modules() if isinstance(module, nn.Embedding)), None)
        return None if table is None else table.num_embeddings

    def make_feeds(self, folder: Any, batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in make_module_inputs(folder, batch, seq, seed).items()}

    def state(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().cpu().numpy() for name, tensor in self._model.state_dict().items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._model.load_state_dict({name: torch.from_numpy(np.asarray(values)) for name, values in state.items()})

    def save_state(self, file: Path) -> None:
        safetensors.torch.save_model(self._model, str(file))

    def read_state(self, file: Path) -> None:
        safetensors.torch.load_model(self._model, str(file))

    def save_layers(self, folder: Any, out: Path) -> None:
        save_module_layers(self._model, folder.sentence, out)

    def fingerprint(self) -> str:
        return fingerprint(self._model)

    @property
    def structure(self) -> list[Any]:
        entries = self.config.to_diff_dict()
        return [type(self._model).__name__, {name: entries[name] for name in entries if name != "_name_or_path"}]

    def linear(self, path: str) -> LinearWeights:
        linear = linear_at(self._model, path)
        bias = None if linear.bias is None else linear.bias.detach().double().cpu().numpy().copy()
        weight = linear_weight(linear).detach()
        return LinearWeights(weight.to(torch.promote_types(weight.dtype, torch.float32)).cpu().numpy().copy(), bias)

    @torch.no_grad()
    def set_linear(self, path: str, weights: LinearWeights) -> None:
        linear = linear_at(self._model, path)
        linear_weight(linear).copy_(torch.from_numpy(weights.weight))
        if weights.bias is not None:
            linear.bias.copy_(torch.from_numpy(weights.bias))

    def groups(self, feeds: Feeds, attention: Attention, group_by: GroupBy = "kv") -> list[PrunableGroup]:
        return find_groups(self._model, _tensors(feeds), attention=attention, group_by=group_by)

    def attentions(self, feeds: Feeds, attention: Attention) -> list[Site]:
        return find_units(self._model, _tensors(feeds), attention=attention).sites

    def no_heads_error(self) -> CompressorError:
        return no_heads_error(self._model)

    def expert_weights(self, groups: Sequence[PrunableGroup]) -> tuple[str, ...]:
        return expert_weights(self._model, groups)

    def forward(self) -> Forward:
        def run(feeds: Feeds) -> Outputs:
            with torch.no_grad():
                outputs = self._model(**forward_arguments(self._model, _tensors(feeds)))
            return {name: value.cpu().numpy() for name, value in get_leaf_tensors(outputs).items()}

        self._model.eval()
        return GeneratingForward(run, lambda _: self._model)

    def snapshot(self) -> Forward:
        return ModuleAccess(copy_of(self._model, with_weights=True)).forward()

    def on_accelerator(self, copies: int = 2) -> AbstractContextManager[None]:
        return on_accelerator(self._model, copies)


def _tensors(feeds: Feeds) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in feeds.items()}
