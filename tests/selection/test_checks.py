"""Checks that precede every computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from datasets import concatenate_datasets

from compressor.config.steps import Blocks, Heads
from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError
from compressor.selection.checks import (
    TRAINING_WITH_MASKS,
    check_certificate,
    check_every_option,
    check_max_drop,
    check_options,
)
from tests.faults import fails_with
from tests.selection import tiny
from tests.selection.tiny import selection


@pytest.mark.parametrize(
    ("method", "options", "field", "code"),
    [
        ("dsp", {"tau": 1}, "tau", ErrorCode.UNKNOWN_NAME),
        ("dsp", {"tau_ini": 0}, "tau_ini", ErrorCode.CONTRADICTION),
        ("dsp", {"warmup": 2}, "warmup", ErrorCode.OUT_OF_RANGE),
        ("dsp", {"pool": "site"}, "pool", ErrorCode.UNKNOWN_NAME),
        ("dsp", {"final_learning_rate": 1}, "final_learning_rate", ErrorCode.OUT_OF_RANGE),
        ("taylor", {"warmup": 0.1}, "warmup", ErrorCode.UNKNOWN_NAME),
        ("random", {"trials": 0}, "trials", ErrorCode.OUT_OF_RANGE),
        ("taylor", {"rows": 0}, "rows", ErrorCode.OUT_OF_RANGE),
    ],
)
def test_options_are_checked_without_a_model(method: str, options: Any, field: str, code: ErrorCode) -> None:
    with fails_with(code, UsageError, field=field):
        check_all(selection(method=method, options=options))


def check_all(*steps: Heads | Blocks) -> None:
    check_every_option(steps)
    for step in steps:
        check_options(step)


def test_options_of_masks_and_of_the_method_are_checked_separately() -> None:
    options = {"share": 0.5, "warmup": 0.1, "mixed_precision": "bf16"}
    check_all(selection(method="taylor", options=options), Blocks(share=0.5, options=options))
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="warmup", subject="taylor"):
        check_all(selection(method="taylor", options=options))
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="share", subject=TRAINING_WITH_MASKS):
        check_all(Blocks(share=0.5, options=options))
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="warmup", subject=TRAINING_WITH_MASKS):
        check_all(selection(method="taylor", options={"warmup": 2}), Blocks(share=0.5, options={"warmup": 2}))


def test_ray_is_checked_for_a_search() -> None:
    unreachable = "127.0.0.1:1"
    with pytest.raises(TargetMissingError):
        check_all(selection(method="taylor", ray=unreachable))


def test_a_loss_that_permits_any_result_is_refused() -> None:
    check_max_drop(0.5, tiny.Sign())
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="max_drop", metric="accuracy"):
        check_max_drop(1.0, tiny.Sign())


@pytest.mark.parametrize("shared", [1, 60])
def test_training_rows_certify_nothing(shared: int) -> None:
    """Rows are compared by their tokens, wherever they are read from."""
    config, data = selection(method="taylor", keep=None, max_drop=0.2, certify=0.9), tiny.data()
    rows = concatenate_datasets([tiny.new_rows(60, 3), data.train.select(range(shared))])
    with fails_with(ErrorCode.ROWS_OVERLAP, InputError, field="eval_data", overlap=shared):
        check_certificate(config, replace(data, eval=rows))


def test_rows_are_counted_before_a_certificate() -> None:
    config = selection(method="taylor", keep=None, max_drop=0.2, certify=0.9)
    check_certificate(config, replace(tiny.data(), eval=tiny.new_rows(60, 3)))
    with fails_with(ErrorCode.TOO_FEW_ROWS, InputError, rows=12):
        check_certificate(config, tiny.data())
