"""Inputs to trace, prove and time a model on: random, but of the shape, range and layout that its processor makes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from optimum.utils import input_generators as optimum
from optimum.utils.normalized_config import NormalizedConfig, NormalizedConfigManager
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.errors import InputError
from compressor.model_folder.loading import ModelFolder
from compressor.models import SegmentConfig
from compressor.segment_memory import memory_names

_NO_TARGET = ("text-classification", "regression", "question-answering")
"""Tasks for which an encoder-decoder makes its decoder's inputs itself."""

_AUDIO: dict[str, type[optimum.DummyAudioInputGenerator]] = {
    "audio-spectrogram-transformer": optimum.ASTDummyAudioInputGenerator,
    "speech_to_text": optimum.Speech2TextDummyAudioInputGenerator,
}
"""Families whose sound is laid out otherwise than `[batch, features, frames]` or `[batch, samples]`."""


def example_inputs(folder: ModelFolder, batch: int, seq: int, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward.

    Text begins and ends as the tokenizer has it, ids `[batch, seq]` int64; with two rows or more the last one is padded
    on the right, so that a mask does work. Images and sound have the one size that the model takes. A model that reads
    segment by segment gets its memories, if it has any, as long as they become beside `seq` tokens, and no mask: a
    stream has no padding.

    Args:
        folder: a loaded folder.
        batch: rows.
        seq: tokens a row, of source and target alike.
        seed: the same seed gives the same inputs.

    Raises:
        InputError: the model takes fewer tokens, or needs an input that is none of text, image and sound.
    """
    model, taken = folder.model, inspect.signature(folder.model.forward).parameters
    made: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if "input_ids" in (model.main_input_name, *_required(taken)):
            made |= _text(folder, batch, seq, taken)
        beside = _two_towers(model.config)
        for name in ("pixel_values", "input_features", "input_values"):
            if name == model.main_input_name or name in _required(taken) or (beside and name in taken):
                made[name] = _signal(name, folder, batch)
        if model.config.is_encoder_decoder and "decoder_input_ids" in taken and folder.task not in _NO_TARGET:
            made["decoder_input_ids"] = _target(model.config, batch, seq)
        memories = _memories(model.config, batch, seq)
    lacking = sorted(_required(taken) - set(made))
    if lacking or not made:
        raise InputError(
            f"{folder.path}: {type(model).__name__} needs {lacking[0] if lacking else model.main_input_name}, which is"
            " neither text, image nor sound; such models are not handled"
        )
    if folder.task == "multiple-choice":
        made = {name: value.unsqueeze(1).repeat(1, 2, *(1,) * (value.dim() - 1)) for name, value in made.items()}
    if isinstance(model.config, SegmentConfig):
        made.pop("attention_mask", None)
    return {name: made[name] for name in taken if name in made} | memories


def token_limit(model: PreTrainedModel) -> int | None:
    """Most tokens a row may have, or None where positions are relative."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    if not limit:
        return None
    # RoBERTa and its kin count positions from the padding's id on, so that many rows of the table are never used.
    offsets = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None
    ]
    return int(limit) - max(offsets, default=0)


def takes_text(folder: ModelFolder) -> bool:
    """Whether a length in tokens means anything: tokens go in, into the encoder or the decoder."""
    return any(name.endswith("input_ids") for name in example_inputs(folder, batch=1, seq=2))


def takes_token_types(model: PreTrainedModel, tokenizer: Any) -> bool:
    """Whether `token_type_ids` go in: the tokenizer makes them, and the model tells a first text from a second by them.

    GPT-2 takes an input of that name for something else, and RoBERTa has one segment only.
    """
    names = getattr(tokenizer, "model_input_names", ("token_type_ids",))
    several = (getattr(model.config.get_text_config(), "type_vocab_size", None) or 0) > 1
    return several and "token_type_ids" in names and "token_type_ids" in inspect.signature(model.forward).parameters


def _required(taken: Any) -> set[str]:
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, found in taken.items() if found.default is found.empty and found.kind in plain}


def _two_towers(config: PretrainedConfig) -> bool:
    """Whether text and image go in side by side, as into CLIP; not where the image's place is a token of the text."""
    inside = hasattr(config, "image_token_id") or hasattr(config, "image_token_index")
    return hasattr(config, "text_config") and hasattr(config, "vision_config") and not inside


def _text(folder: ModelFolder, batch: int, seq: int, taken: Any) -> dict[str, Tensor]:
    limit = token_limit(folder.model)
    if limit is not None and seq > limit:
        raise InputError(f"{folder.path}: takes at most {limit} tokens, {seq} were asked for; ask for fewer (--seq)")
    config, tokenizer = folder.config.get_text_config(), getattr(folder.processor, "tokenizer", folder.processor)
    first, last = _special(config, tokenizer, "bos", "cls"), _special(config, tokenizer, "eos", "sep")
    ids = _ordinary_ids(config, batch, seq, set(getattr(tokenizer, "all_special_ids", ())))
    mask = torch.ones(batch, seq, dtype=torch.int64)
    if batch > 1 and seq > 1:
        mask[-1, -max(1, seq // 4) :] = 0
    ends = mask.sum(-1)
    if first is not None and seq > 2:
        ids[:, 0] = first
    if last is not None:
        ids[torch.arange(batch), ends - 1] = last
    ids[mask == 0] = _special(config, tokenizer, "pad") or 0
    made = {"input_ids": ids}
    if "attention_mask" in taken:
        made["attention_mask"] = mask
    if takes_token_types(folder.model, tokenizer):
        second = torch.arange(seq)[None] >= (ends // 2)[:, None]
        made["token_type_ids"] = (second & (mask == 1)).long()
    return made


def _memories(config: PretrainedConfig, batch: int, seq: int) -> dict[str, Tensor]:
    """Memories as long as positions allow beside `seq` tokens; nothing for a model that has none."""
    if not isinstance(config, SegmentConfig) or not config.memory_length:
        return {}
    length = min(config.memory_length, config.max_position_embeddings - seq)
    names = memory_names(config.num_hidden_layers)
    return {name: torch.randn(batch, length, config.hidden_size) for name in names}


def _target(config: PretrainedConfig, batch: int, seq: int) -> Tensor:
    limit = getattr(config, "max_target_positions", None) or seq
    ids = _ordinary_ids(config, batch, min(seq, limit), set())
    start = getattr(config, "decoder_start_token_id", None)
    if start is not None:
        ids[:, 0] = start
    return ids


def _signal(name: str, folder: ModelFolder, batch: int) -> Tensor:
    """An image or a stretch of sound of the size that the configuration gives, by optimum's generators."""
    config = folder.config
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        kind = optimum.DummyVisionInputGenerator(folder.task, _normalized(vision), batch_size=batch)
        return kind.generate(name)
    normal = _normalized(config)
    given = {"feature_size": config.num_mel_bins} if hasattr(config, "num_mel_bins") else {}
    if config.model_type == "whisper":
        given["nb_max_frames"] = 2 * config.max_source_positions  # a convolution of stride two comes first
    sound = _AUDIO.get(config.model_type, optimum.DummyAudioInputGenerator)
    return sound(folder.task, normal, batch_size=batch, **given).generate(name)


def _normalized(config: PretrainedConfig) -> NormalizedConfig:
    if config.model_type in NormalizedConfigManager._conf:
        return NormalizedConfigManager.get_normalized_config_class(config.model_type)(config)
    return NormalizedConfig(config)


def _ordinary_ids(config: PretrainedConfig, batch: int, seq: int, special: set[int]) -> Tensor:
    """Random ids `[batch, seq]` that mean no beginning, end, padding or mask, where the vocabulary has such."""
    named = [value for name, value in config.to_dict().items() if name.endswith("_token_id")]
    flat = {one for value in named for one in (value if isinstance(value, list) else [value])}
    special = special | {value for value in flat if isinstance(value, int)}
    size = int(config.vocab_size)
    ordinary = torch.tensor([token for token in range(size) if token not in special] or list(range(size)))
    return ordinary[torch.randint(len(ordinary), (batch, seq))]


def _special(config: PretrainedConfig, tokenizer: Any, *names: str) -> int | None:
    """The id of the first of `names` that the tokenizer, or else the configuration, has."""
    for holder in (tokenizer, config):
        for name in names:
            value = getattr(holder, f"{name}_token_id", None)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and 0 <= value < config.vocab_size:
                return value
    return None
