"""Arguments of the trainer for a schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments

from compressor.training.trainer import training_arguments, use_one_device
from tests import language
from tests.selection import tiny


def test_a_process_uses_one_device(tmp_path: Path) -> None:
    for visible, used in ((0, 0), (1, 1), (4, 1)):
        arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=3, use_cpu=True)
        assert arguments.device.type == "cpu"
        arguments._n_gpu = visible
        use_one_device(arguments)
        assert (arguments.n_gpu, arguments.train_batch_size, arguments.eval_batch_size) == (used, 3, 8)


def test_the_loss_is_the_mean_over_processes(tmp_path: Path) -> None:
    """transformers multiplies the loss by the number of processes by default, but not the penalty of a gate."""
    arguments = training_arguments(language.schedule(steps=4, evaluations=1, points=1), tiny.Sign(), tmp_path)
    assert not arguments.average_tokens_across_devices


@pytest.mark.parametrize(
    ("steps", "evaluations", "points", "evaluation_steps", "logging_steps"),
    [(12, 4, 12, 3, 1), (12, 4, 3, 3, 3), (100, 10, 25, 10, 2), (3, 12, 60, 1, 1), (100, 1, 6, 100, 10)],
)
def test_evaluations_fall_on_points_of_the_curves(
    steps: int, evaluations: int, points: int, evaluation_steps: int, logging_steps: int, tmp_path: Path
) -> None:
    schedule = language.schedule(steps=steps, evaluations=evaluations, points=points)
    arguments = training_arguments(schedule, tiny.Sign(), tmp_path)
    assert (arguments.eval_steps, arguments.save_steps, arguments.logging_steps) == (
        evaluation_steps,
        evaluation_steps,
        logging_steps,
    )
    assert evaluation_steps % logging_steps == 0


def test_large_seeds_are_in_the_range_of_numpy(tmp_path: Path) -> None:
    assert training_arguments(language.schedule(seed=2**32 + 5), tiny.Sign(), tmp_path).seed == 5
