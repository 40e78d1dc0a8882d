"""What a run reads and changes of a model: the graph of a file, or a module of PyTorch.

Nothing here needs PyTorch. A model of PyTorch has no such interface of its own: `access_of` makes it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from compressor.config.values import GroupBy
from compressor.errors import CompressorError
from compressor.targets.base import Feeds
from compressor.units import PrunableGroup, Site
from compressor.units.prunable import Attention, LinearWeights
from graph_passes import Plan
from graph_passes.attention.gate_initializers import GATE_SUFFIXES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Outputs = dict[str, np.ndarray]
Forward = Callable[[Feeds], Outputs]
"""Outputs by name, `[batch, ...]` each, of the inputs of a model by name."""
_MODULES = "compressor.model_folder.module_access:ModuleAccess"
"""The interface of modules of PyTorch, which is imported where there is one."""


class ModelAccess(ABC):
    """What a run reads and changes of a model.

    Attributes:
        exporter: module whose functions write graphs of the model and prove them; see `engines.export`.
        cached_exporter: that of the graphs with key/value caches of one that generates; see `generation.export_module`.
        config: its configuration.
        file: the file of its graph; None: it is a module of PyTorch.
        precision: the precision in which its weights are stored; computations are in float32.
        generates: whether it continues texts, with a cache of keys and values.
        changes_with_length: whether it may compute another function on longer texts, as the code of a module may.
        text_length: number of tokens of every text; None: it takes texts of several lengths, or none.
    """

    exporter: ClassVar[str]
    cached_exporter: ClassVar[str]
    config: Any
    file: Path | None = None
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    generates: bool = False
    changes_with_length: ClassVar[bool] = True
    text_length: int | None = None

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that it takes."""

    @property
    @abstractmethod
    def network(self) -> PreTrainedModel:
        """The model as a module of PyTorch, for what learns by gradients."""

    @property
    @abstractmethod
    def table_size(self) -> int | None:
        """Number of ids in the first table of embeddings; None: there is none."""

    @abstractmethod
    def make_feeds(self, folder: Any, batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
        """Inputs of the model of a folder that has no example; see `example_feeds`."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """Everything by which models of the same structure differ, by name; arrays may share the memory of the model.

        For a graph these are the weights alone, in the layouts of its initializers.
        """

    @abstractmethod
    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Give the model the values of a `state`."""

    def copy_state(self) -> dict[str, np.ndarray]:
        """The `state` in memory of its own."""
        return {name: values.copy() for name, values in self.state().items()}

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The tensors of floating-point numbers that are no gates, by name."""
        return {
            name: values
            for name, values in self.state().items()
            if values.dtype.kind == "f" and not name.endswith(GATE_SUFFIXES)
        }

    @property
    def nbytes(self) -> int:
        """Size of the weights in memory."""
        return sum(values.nbytes for values in self.state().values())

    def save_state(self, file: Path) -> None:
        """Write the `state` as a file of safetensors."""
        save_file({name: np.ascontiguousarray(values) for name, values in self.state().items()}, file)

    def read_state(self, file: Path) -> None:
        """Give the model the `state` of a file of safetensors."""
        self.load_state(load_file(file))

    def save_layers(self, folder: Any, out: Path) -> None:  # noqa: B027 - few models have such layers
        """Write the weights of layers that a library loads beside an engine, for the model of a folder."""

    @abstractmethod
    def fingerprint(self) -> str:
        """`sha256:...` of what the model computes: its structure and weights; gates are left out."""

    @property
    @abstractmethod
    def structure(self) -> list[Any]:
        """What times depend on, besides the units: not the weights."""

    def structure_with(self, groups: Sequence[PrunableGroup]) -> str:
        """What times depend on of a model with groups of units."""
        units = [(group.name, group.units, group.multiple, group.parts) for group in groups]
        return json.dumps([*self.structure, units], sort_keys=True, default=str)

    @abstractmethod
    def linear(self, path: str) -> LinearWeights:
        """A copy of the weights of the linear that a group ends in."""

    @abstractmethod
    def set_linear(self, path: str, weights: LinearWeights) -> None:
        """Give such a linear other weights, and another bias where it has one."""

    @abstractmethod
    def groups(self, feeds: Feeds, attention: Attention, group_by: GroupBy = "kv") -> list[PrunableGroup]:
        """The groups of units, in the order in which the model calls them; see `find_groups`.

        Args:
            feeds: inputs by which they are searched.
            attention: form of attention in which the model then runs.
            group_by: how query heads that share key/value heads are removed.

        Raises:
            CompressorError: there are none, or the model does not run on the inputs.
        """

    @abstractmethod
    def attentions(self, feeds: Feeds, attention: Attention) -> list[Site]:
        """The attentions, possibly none; see `groups`."""

    @abstractmethod
    def no_heads_error(self) -> CompressorError:
        """The error for a model without attention heads, where heads are to be removed."""

    def expert_weights(self, groups: Sequence[PrunableGroup]) -> tuple[str, ...]:
        """Names of the modules of experts, whose neurons are no units; none where they are not known."""
        return ()

    @abstractmethod
    def forward(self) -> Forward:
        """Runs the model with its present weights; request it again when they have changed."""

    @abstractmethod
    def snapshot(self) -> Forward:
        """Runs the model with the weights that it has now, also when they have changed."""

    @abstractmethod
    def on_accelerator(self, copies: int = 2) -> AbstractContextManager[None]:
        """Inside, the model is on the GPU if PyTorch runs it there; see `processes.on_accelerator`."""

    def fold_gates(self, plan: Plan, groups: Sequence[PrunableGroup]) -> list[PrunableGroup]:
        """Multiply the gates of a plan into the weights of the linears that groups end in, so that none is needed.

        Returns:
            The groups without such a linear whose units the plan drops or scales: their gates are not folded.
        """
        gates, left = {group.name: group.gate for group in plan.groups}, []
        for group in (group for group in groups if group.name in gates):
            if group.linear is not None:
                gate = np.repeat(np.array(gates[group.name], np.float32), group.width)
                before = self.linear(group.linear)
                self.set_linear(group.linear, LinearWeights(before.weight * gate, before.bias))
            elif any(gate != 1 for gate in gates[group.name]):
                left.append(group)
        return left


def access_of(model: Any) -> ModelAccess:
    """What a run reads and changes of a model.

    Args:
        model: a `ModelAccess` itself, or a model of transformers, possibly wrapped for training.
    """
    if isinstance(model, ModelAccess):
        return model
    module, _, name = _MODULES.partition(":")
    access: ModelAccess = getattr(import_module(module), name)(model)
    return access
