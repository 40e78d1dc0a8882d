"""Tiny random models that generate, and folders with their graphs, exported once for all processes of a test run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from compressor.generation.deliver import CachedGraphs
from compressor.results import Proof, ProofStage
from compressor.targets import TARGETS, target
from compressor.targets.caches import DECODER, ENCODER
from compressor.units import PrunableGroup, find_groups, keep_all
from graph_passes import Plan
from tests.shared_exports import shared_generation
from tests.written_once import FOLDER

_SIZES: dict[str, Any] = {"vocab_size": 99, "max_position_embeddings": 64}
_LAYERS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5: dict[str, Any] = {
    "vocab_size": 99,
    "decoder_start_token_id": 0,
    "d_model": 16,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
}
_PAIR: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, **_LAYERS, num_key_value_heads=2, head_dim=8)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_SIZES, **_PAIR, forced_eos_token_id=None)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **{"vocab_size": 99, **_PAIR, "max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 8},
            pad_token_id=48,
            decoder_start_token_id=47,
            eos_token_id=46,
            bos_token_id=46,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    ),
}
RUNTIMES = [name for name in TARGETS if target(name).caches is not None]
"""Targets whose engines keep caches."""
QUICK = ("llama", "t5")
"""A decoder-only model and an encoder-decoder; exports take ten seconds each."""


def model(name: str) -> PreTrainedModel:
    """A random model, whose tokens vary."""
    return random_model(MODELS[name])


def random_model(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model with random weights, so large that tokens vary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make().eval()
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3)
    return network


def inputs(name: str) -> dict[str, Tensor]:
    """A batch of three texts with padding where decoders and encoders have it, or of two sounds."""
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=generator)}
    ids = torch.randint(5, 90, (3, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    mask = mask if MODELS[name]().config.is_encoder_decoder else mask.flip(1)
    return {"input_ids": ids, "attention_mask": mask}


def exported(name: str) -> Path:
    """The folder of a model with its graphs."""
    folder = Path(os.environ[FOLDER]) / f"generation-{name}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    network, batch = model(name), inputs(name)
    if network.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.arange(4).expand(len(batch[network.main_input_name]), 4)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent, suppress(OSError):
        written = Path(parent) / name
        network.save_pretrained(written)
        shared_generation(network, keep_all(find_groups(network, batch)), written)
        written.rename(folder)  # fails if another process has written it
    return folder


def built(name: str, runtime: str) -> Path:
    """The folder of a model with the engines of a runtime."""
    source = exported(name)
    folder = source.with_name(f"{source.name}-{runtime}")
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent, suppress(OSError):
        if not folder.is_dir():
            written = shutil.copytree(source, Path(parent) / name)
            target(runtime).build_sessions(written, (ENCODER, DECODER), [(2, 8)], 1)
            written.rename(folder)  # fails if another process has written it
    return folder


def whole_graphs(name: str) -> tuple[CachedGraphs, Plan, list[PrunableGroup]]:
    """The exported graphs of a model, the plan that keeps every unit, and its groups of heads."""
    network, batch = model(name), inputs(name)
    if network.config.is_encoder_decoder:
        read = next(iter(batch.values()))  # tokens, or the features of sounds
        batch["decoder_input_ids"] = torch.arange(3, 7).repeat(len(read), 1)
    groups = find_groups(network, batch)
    proof = Proof(variant="dense", stage=ProofStage.CACHED_EXPORT, error=0.0, tolerance=1e-4, cases=())
    files = tuple(path.name for path in sorted(exported(name).glob("*coder.onnx"), reverse=True))
    plan = keep_all(groups)
    heads = [group for group in groups if group.type == "heads"]
    return CachedGraphs(files, exported(name), plan, "sdpa", proof), plan, heads
