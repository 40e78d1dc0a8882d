"""Inputs of the proofs of graphs with caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compressor.engines.prove import Case
from compressor.errors import ErrorCode, InputError
from compressor.generation.prove import generation_cases

IDS, MASK = np.array([[5, 6, 7], [8, 9, 0]]), np.array([[1, 1, 1], [1, 1, 0]])


def test_texts_to_continue_are_padded_on_the_left_and_of_one_type() -> None:
    feeds = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": np.array([[0, 1, 1], [0, 1, 0]])}
    (case,) = generation_cases([Case(feeds, "two texts")])
    assert case.feeds.keys() == {"input_ids", "attention_mask"}
    assert case.feeds["input_ids"].tolist() == [[5, 6, 7], [0, 8, 9]]
    assert case.feeds["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize(("name", "options"), [("pixel_values", {}), ("token_type_ids", {"left_out": ()})])
def test_an_input_beside_the_text_is_refused_by_name(name: str, options: Any) -> None:
    with pytest.raises(InputError) as error:
        generation_cases([Case({"input_ids": IDS, name: np.zeros((2, 3))}, "two texts")], **options)
    assert (error.value.code, error.value.details["inputs"]) == (ErrorCode.UNSUPPORTED_MODEL, [name])
