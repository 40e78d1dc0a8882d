"""A trainer of models with segment memory; memories pass from step to step and are stored in every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from compressor.models.segments import Memories
from compressor.tasks.causal_lm import summed_loss
from compressor.tasks.segment_streams import FILLER
from compressor.training.checkpoints import memory_file
from compressor.training.trainer import GateTrainer


class StreamRows(Dataset[Any]):
    """Rows in the order in which parallel streams read them; None for `FILLER`.

    Args:
        rows: encoded rows.
        order: row numbers; the first segment of every stream, then the second segment of every stream, and so on.
    """

    def __init__(self, rows: datasets.Dataset, order: Sequence[int]) -> None:
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return None if (row := self.order[index]) == FILLER else self.rows[row]


class SegmentTrainer(GateTrainer):
    """`GateTrainer` over streams: each batch is the next segment of every stream, with the memories of the one before.

    Args:
        pass_steps: number of steps after which the streams end and start again without memory.
        kwargs: arguments of `GateTrainer`.
    """

    def __init__(self, *, pass_steps: int, **kwargs: Any) -> None:
        self.pass_steps = pass_steps
        self.train_memories: Memories | None = None
        self.eval_memories: Memories | None = None
        super().__init__(**kwargs)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step % self.pass_steps == 0:
            self.train_memories = None
        kwargs["return_outputs"] = True
        loss, outputs = super().compute_loss(model, {**inputs, "memories": self.train_memories}, *args, **kwargs)
        self.train_memories = outputs.memories
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.eval_memories = None
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[None, Tensor, Tensor]:
        """Statistics of each row instead of its logits, which would not fit in memory."""
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("shift_labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, memories=self.eval_memories)
        self.eval_memories = outputs.memories
        return None, summed_loss(outputs.logits, targets), targets

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        memories = {str(layer): memory.contiguous() for layer, memory in enumerate(self.train_memories or ())}
        safetensors.torch.save_file(memories, memory_file(Path(output_dir), self.args.process_index))
        self.accelerator.wait_for_everyone()  # older checkpoints are deleted only after all processes have written

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            memories = safetensors.torch.load_file(memory_file(Path(checkpoint), self.args.process_index))
            layers = tuple(memories[str(layer)].to(self.args.device) for layer in range(len(memories)))
            self.train_memories = layers or None
