"""Texts are scored as they are generated: with caches, by engines and by models of PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from compressor.generation.deliver import open_engines
from compressor.graph.signature import GeneratingForward
from compressor.models.beam_search import beam_search
from compressor.models.forwards import arrays_of, tensors_of
from compressor.targets import DEFAULT_TARGET, target
from tests.generation.exported import exported, inputs, model

LONGEST = 12


def run_of(network: Any) -> Any:
    """A forward of whole texts."""

    def run(batch: dict[str, np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(network(**tensors_of(batch), use_cache=False).logits)

    return run


def ids_of(forward: Any, network: PreTrainedModel, beams: int) -> Tensor:
    batch = arrays_of(inputs("t5"))
    return torch.from_numpy(beam_search(network, forward, batch, beams, LONGEST))


def ids_without_cache(network: Any, beams: int) -> Tensor:
    ids: Tensor = network.generate(**inputs("t5"), num_beams=beams, max_new_tokens=LONGEST, use_cache=False)
    return ids


def end_early(network: Any) -> None:
    """Let a text of a batch end before another one: by a token that this one lacks until then."""
    greedy = ids_without_cache(network, 1)
    for column, (text, sibling) in itertools.product(range(2, LONGEST - 1), itertools.permutations(greedy, 2)):
        if not (sibling[: column + 1] == text[column]).any():
            network.generation_config.eos_token_id = int(text[column])
            return
    raise AssertionError("no token ends a text before another one")


@pytest.mark.parametrize("beams", [1, 4])
def test_texts_by_caches_equal_those_without(beams: int) -> None:
    network = model("t5")
    end_early(network)
    expected = ids_without_cache(network, beams)
    engine = open_engines(target(DEFAULT_TARGET), exported("t5"), 1)
    forwards = [GeneratingForward(run_of(network), each) for each in (engine.generator, lambda _: network)]
    for forward in (*forwards, run_of(network)) if beams > 1 else forwards:
        assert torch.equal(ids_of(forward, network, beams), expected)
    lengths = (expected != 0).sum(1)
    assert beams > 1 or lengths.min() < lengths.max()


def test_a_decoder_may_have_more_layers_than_the_encoder() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_ff": 20,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "d_kv": 8,
        "vocab_size": 99,
        "decoder_start_token_id": 0,
    }
    network = T5ForConditionalGeneration(T5Config(**sizes)).eval()
    run = run_of(network)
    assert torch.equal(ids_of(GeneratingForward(run, lambda _: network), network, 2), ids_of(run, network, 2))
