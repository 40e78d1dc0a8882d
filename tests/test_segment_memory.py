"""Names of memories, and their order."""

from __future__ import annotations

import pytest

from compressor.errors import ErrorCode, InputError
from compressor.segment_memory import memory_names, new_memory_names, ordered_memories


def test_memories_are_in_the_order_of_the_layers() -> None:
    inputs = {name: number for number, name in reversed(list(enumerate(memory_names(11))))}
    assert ordered_memories({"input_ids": -1, **inputs}) == list(range(11))
    assert ordered_memories({"input_ids": -1}) == []


def test_a_missing_memory_is_named() -> None:
    with pytest.raises(InputError) as error:
        ordered_memories({"memory_0": 0, "memory_2": 2})
    assert (error.value.code, error.value.details["tensor"]) == (ErrorCode.TENSOR_MISMATCH, "memory_1")


def test_new_memories_are_the_outputs_for_the_next_segment() -> None:
    assert new_memory_names(2) == [f"new_{name}" for name in memory_names(2)]
