"""The trainer of models with segment memory: what is remembered goes from step to step, and into every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import Dataset as Numbered

from compressor.models.segments import Memories
from compressor.tasks.causal_lm import summed_loss
from compressor.tasks.segment_streams import FILLER
from compressor.training.checkpoints import memory_file
from compressor.training.trainer import GateTrainer


class Laid(Numbered[Any]):
    """Rows in a given order, `FILLER` as None."""

    def __init__(self, rows: Dataset, order: Sequence[int]) -> None:
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return None if (row := self.order[index]) == FILLER else self.rows[row]


class SegmentTrainer(GateTrainer):
    """`GateTrainer` over streams: every batch is the next segment of each, and meets the memories of the last one.

    Args:
        pass_steps: steps in which the streams are read to their end; then they begin again, without memory.
    """

    def __init__(self, *, pass_steps: int, **kwargs: Any) -> None:
        self.pass_steps = pass_steps
        self.memories: Memories | None = None  # of the training streams
        self.evaluated: Memories | None = None  # of those that are evaluated
        super().__init__(**kwargs)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step % self.pass_steps == 0:
            self.memories = None
        kwargs["return_outputs"] = True
        loss, outputs = super().compute_loss(model, {**inputs, "memories": self.memories}, *args, **kwargs)
        self.memories = outputs.memories
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluated = None
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[None, Tensor, Tensor]:
        """Statistics of each row in place of its logits, which would not fit in memory."""
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("shift_labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, memories=self.evaluated)
        self.evaluated = outputs.memories
        return None, summed_loss(outputs.logits, targets), targets

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        held = {str(layer): memory.contiguous() for layer, memory in enumerate(self.memories or ())}
        safetensors.torch.save_file(held, memory_file(Path(output_dir), self.args.process_index))
        self.accelerator.wait_for_everyone()  # older checkpoints go only once all have written

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            held = safetensors.torch.load_file(memory_file(Path(checkpoint), self.args.process_index))
            self.memories = tuple(held[str(layer)].to(self.args.device) for layer in range(len(held))) or None
