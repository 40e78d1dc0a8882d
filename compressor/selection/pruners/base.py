"""The interface of methods that remove heads and neurons under a budget, without training."""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from compressor.answers import several_answers
from compressor.errors import ErrorCode, InputError
from compressor.model_folder.access import ModelAccess, access_of
from compressor.progress import ProgressCallback, ignore_progress
from compressor.results import Note
from compressor.selection.allocation import Curve
from compressor.selection.options import MethodOptions
from compressor.store import Store
from compressor.units import PrunableGroup

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

OptionsT = TypeVar("OptionsT", bound=MethodOptions)
Batch = Mapping[str, Any]
"""Name of an input -> array `[batch, ...]`, or tensor on the CPU."""


@dataclass(frozen=True)
class PruningInputs:
    """The inputs of a method that removes units.

    Attributes:
        model: the model: of PyTorch, or a `ModelAccess` such as that of a file.
        groups: the groups whose units may be removed, in the order in which the model calls them.
        statistics: batches by which units are chosen and weights refitted: name of an input -> array `[batch, ...]`.
        held_out: batches of other rows in the same form, on which `reconstruct` measures losses.
        outputs: names of the model's outputs that the task scores, e.g. `("logits",)`.
        seed: seed of the draws of `reconstruct`; `fisher` draws the signs of embeddings alone, with a fixed seed.
        store: folder of finished parts, from which an interrupted run continues. It may also hold parts of other
            weights, batches or options.

    Raises:
        InputError: there are no outputs, or the linear at the end of a group is unknown.
    """

    model: Any
    groups: Sequence[PrunableGroup]
    statistics: Sequence[Batch]
    held_out: Sequence[Batch]
    outputs: Sequence[str]
    seed: int
    store: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", Path(self.store))
        if isinstance(self.outputs, str) or not self.outputs:
            raise _invalid("outputs", "there are no names; give the names of the model's outputs, such as ('logits',)")
        if unknown := [group.name for group in self.groups if group.linear is None]:
            raise _invalid(
                "groups", f"the linear that reads the units of {unknown[0]} was not recognized; leave the group out"
            )

    @staticmethod
    def tensors(batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """Batches as tensors on the CPU."""
        import torch

        return [{name: torch.as_tensor(values) for name, values in batch.items()} for batch in batches]

    @property
    def access(self) -> ModelAccess:
        """The model as the method reads and changes it."""
        return access_of(self.model)

    @property
    def network(self) -> PreTrainedModel:
        """The model as a module of PyTorch."""
        return self.access.network


class Pruner(ABC, Generic[OptionsT]):
    """Chooses the units that each group keeps at every number of units, and gives the model its weights.

    Attributes:
        options_class: class of the options; `MethodOptions` itself if there are none.
        reads_rows: whether the method reads the batches.

    Raises:
        InputError: there are no batches, and the method reads them.
    """

    options_class: type[OptionsT]
    reads_rows = True

    def __init__(self, inputs: PruningInputs, options: OptionsT | None = None) -> None:
        for name in ("statistics", "held_out") if self.reads_rows else ():
            if not getattr(inputs, name):
                raise _invalid(name, "there are no batches; give at least one batch")
        self.inputs = inputs
        self.options = options or self.options_class()

    @functools.cached_property
    def store(self) -> Store:
        """Keeps finished parts, under keys of everything that they depend on except the code."""
        inputs = self.inputs
        settings = [
            inputs.access.fingerprint(),
            [[group.name, group.bundle, group.parts, group.limit] for group in inputs.groups],
            [*inputs.outputs, *filter(None, [several_answers(inputs.model.config)])],
            inputs.seed,
            self.options.model_dump(mode="json"),
        ]
        content = hashlib.sha256(json.dumps(settings).encode())
        for batches in (inputs.statistics, inputs.held_out):
            for batch in batches:
                for name, values in batch.items():
                    array = np.ascontiguousarray(values)
                    content.update(f"{name} {array.shape} {array.dtype}".encode())
                    content.update(array.data)
        key = content.hexdigest()
        return Store(inputs.store / key[:16], {"pruning": key}, is_shared=True)

    def require_counts(self, counts: Mapping[str, int]) -> None:
        """Raise InputError unless there is a number of units for each group, and for no other name."""
        names = {group.name for group in self.inputs.groups}
        for name in sorted(names ^ set(counts)):
            reason = "is missing; give a number of units for each group" if name in names else "is no group; remove it"
            raise _invalid("counts", f"{name} {reason}")

    @property
    def notes(self) -> tuple[Note, ...]:
        """Facts for the reader of the report about the weights of the last `finish`."""
        return ()

    @abstractmethod
    def rank(self, on_progress: ProgressCallback = ignore_progress) -> None:
        """Rank the units of every group; called first."""

    @abstractmethod
    def losses(self, on_progress: ProgressCallback = ignore_progress) -> dict[str, Curve]:
        """The loss of each group alone: name of the group -> number of units -> loss, zero for all units; after `rank`.

        Each method has a unit of its own, so losses of two methods cannot be compared: `reconstruct` has the mean
        divergence of a row at temperature 2 (in nats), `fisher` a sum of squared gradients, `magnitude` a share of the
        squared norm of the weights.
        """

    @abstractmethod
    def kept(self, group: PrunableGroup, count: int) -> tuple[int, ...]:
        """Ids of the units that a group keeps if `count` are, ascending; after `rank`.

        Raises:
            KeyError: the units of the group have not been ranked.
            ValueError: so many units cannot be kept; see `PrunableGroup.require_count`.
        """

    @abstractmethod
    def finish(self, counts: Mapping[str, int], on_progress: ProgressCallback = ignore_progress) -> None:
        """Give the model the weights of a plan.

        The model has its original weights when this is called; an exception or an interruption leaves it between the
        two.

        Args:
            counts: name of the group -> number of units that are kept; see `require_counts`.
        """


def _invalid(field: str, reason: str) -> InputError:
    return InputError(f"{field}: {reason}", code=ErrorCode.INVALID_VALUE, field=field)
