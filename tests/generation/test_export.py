"""Models whose state is not keys and values alone, or whose inputs have no fixed size, are refused before an export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from compressor.engines.prove import Case
from compressor.errors import ErrorCode, InputError
from compressor.generation.export import export_generation
from compressor.generation.export_module import _require_use_of_cache
from compressor.units import find_groups, keep_all
from graph_passes import Plan
from tests.generation.exported import MODELS, inputs, model

_SIZES: dict[str, Any] = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}


def whisper_of_any_length() -> PreTrainedModel:
    network = MODELS["whisper"]()
    object.__setattr__(network.config, "max_source_positions", None)  # as of families that lack it
    return network


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "no cache": lambda: hf.BertLMHeadModel(hf.BertConfig(**_SIZES, num_attention_heads=2)),
    "recurrent layers": lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1)),
    "layers of both kinds": lambda: hf.FalconH1ForCausalLM(
        hf.FalconH1Config(**_SIZES, **_HEADS, mamba_d_ssm=32, mamba_d_head=8, mamba_n_heads=4, mamba_n_groups=1)
    ),
    "sounds of any length": whisper_of_any_length,
}
"""What graphs with caches do not hold -> makes a model that has it."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_with_another_state_or_free_sounds_is_refused(name: str, tmp_path: Path) -> None:
    network = REFUSED[name]().eval()
    with pytest.raises(InputError) as error:
        export_generation(network, Plan(groups=()), tmp_path)
    assert (error.value.code, error.value.details["family"]) == (ErrorCode.UNSUPPORTED_MODEL, network.config.model_type)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_model_that_computes_something_else_with_a_cache_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, batch = model(name), inputs(name)
    if network.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.arange(4).expand(len(batch["input_ids"]), 4)
    plan = keep_all(find_groups(network, batch))
    texts = [Case({name: value.numpy() for name, value in batch.items()}, "a batch")]
    _require_use_of_cache(network, plan, texts, "eager")
    forward = type(network).forward

    def reads_the_last(self: Any, *arguments: Any, use_cache: bool | None = None, **read: Any) -> Any:
        result = forward(self, *arguments, use_cache=use_cache, **read)
        result.logits = result.logits[:, -1:].expand_as(result.logits) if use_cache else result.logits
        return result

    monkeypatch.setattr(type(network), "forward", reads_the_last)
    with pytest.raises(InputError) as error:
        _require_use_of_cache(network, plan, texts, "eager")
    assert error.value.code == ErrorCode.UNSUPPORTED_MODEL
