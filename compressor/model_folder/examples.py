"""Random inputs to trace, verify and time a model, in the shape, range and layout that its processor produces."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from compressor.config.tasks import SEQUENCE_CLASSIFIERS
from compressor.errors import CompressorError
from compressor.model_folder.feeds import (
    cannot_make,
    example_feeds,
    ordinary_ids,
    text_feeds,
    text_tokenizer,
    vocabulary_size,
)
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.input_rules import PATCH_POSITIONS, SIGNALS, InputRequest, example_signal, make_inputs
from compressor.model_folder.processor import IMAGES
from compressor.model_folder.text_limits import image_tokens
from compressor.models import SegmentConfig
from compressor.segment_memory import memory_names

_NO_TARGET = (*SEQUENCE_CLASSIFIERS, "question-answering")
"""Tasks for which an encoder-decoder model derives its decoder inputs itself."""

Parameters = Mapping[str, inspect.Parameter]
"""The parameters of a model's forward by name."""


def example_inputs(folder: ModelFolder, batch: int, seq: int, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward for a trial: from the folder's example, else generated.

    Token ids `[batch, seq]` int64 have special tokens where the tokenizer puts them, and random ordinary tokens. The
    last of several rows is padded on the right.

    Args:
        folder: the model, as `load` returns it.
        batch: number of rows.
        seq: tokens of each row, of source and target alike; images and sounds have their own sizes.
        seed: seed of the random tokens and values.

    Returns:
        Name of an input -> tensor `[batch, ...]`.

    Raises:
        InputError: the model reads fewer than `seq` tokens, or needs an input that no rule generates.
    """
    return {name: torch.from_numpy(array) for name, array in example_feeds(folder, batch, seq, seed).items()}


def make_module_inputs(folder: ModelFolder, batch: int, seq: int, seed: int) -> dict[str, Tensor]:
    """Inputs of a model of PyTorch that has no example; see `example_feeds`.

    Token ids `[batch, seq]` int64 have special tokens where the examples of the task have them, else where the
    tokenizer puts them, around two texts if the model distinguishes two; ordinary tokens are random. The last of
    several examples is padded on the right, so that the mask has an effect. Tokens of an image precede the text
    (BLIP-2, Kosmos-2). Images have the size that the processor of a classifier returns, other images and sound that of
    the configuration. A model with segment memory gets the longest memories that its positions permit with `seq`
    tokens, and no mask, since streams have no padding.

    Args:
        seq: tokens of an example, of source and target alike.

    Raises:
        InputError: the model reads fewer than `seq` tokens, or needs an input that no rule generates.
    """
    model, parameters = folder.model, inspect.signature(folder.model.forward).parameters
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inputs = _inputs(folder, batch, seq, parameters)
        except CompressorError:
            raise
        except Exception as error:  # sizes of a configuration that no rule was written for
            raise cannot_make(folder, f"has sizes that the rules for inputs do not cover ({error})") from error
        memories = _memories(model.config, batch, seq)
    missing = sorted(_required(parameters) - set(inputs))
    if missing or not inputs:
        name = missing[0] if missing else model.main_input_name
        raise cannot_make(folder, f"needs {name}, which no rule generates", input=name)
    if folder.task == "multiple-choice":
        inputs = {name: value.unsqueeze(1).repeat(1, 2, *(1,) * (value.dim() - 1)) for name, value in inputs.items()}
    if isinstance(model.config, SegmentConfig):
        inputs.pop("attention_mask", None)
    return {name: inputs[name] for name in parameters if name in inputs} | memories


def _inputs(folder: ModelFolder, batch: int, seq: int, parameters: Parameters) -> dict[str, Tensor]:
    """The inputs that a model needs, as far as they can be generated."""
    model, inputs = folder.model, dict[str, Tensor]()
    needed, two_towers = _needed(model, parameters), _has_two_towers(model.config)
    reads_text = two_towers or len(image_tokens(model.config)) > 0
    if "input_ids" in needed or (reads_text and "input_ids" in parameters):
        texts = text_feeds(folder, batch, seq, parameters, _draw)
        inputs |= {name: torch.from_numpy(array) for name, array in texts.items()}
    request = InputRequest(model, batch, seq, needed, inputs)
    for name in (name for name in SIGNALS if name in parameters):
        if (name in needed or two_towers) and not (name == IMAGES and request.has_patches):
            known = folder.image_size if name == IMAGES else None
            inputs[name] = (
                example_signal(name, model, folder.task, batch) if known is None else torch.randn(batch, *known)
            )
    inputs |= make_inputs(request, sorted(needed - set(inputs)))
    if model.config.is_encoder_decoder and "decoder_input_ids" in parameters and folder.task not in _NO_TARGET:
        inputs["decoder_input_ids"] = _target(folder, batch, seq)
    return inputs


def _needed(model: PreTrainedModel, parameters: Parameters) -> frozenset[str]:
    """Names of the inputs that a model needs.

    These are its parameters without a default, its main input, and the future of a time series; and with patches of
    images their positions and mask, which have defaults in some classes. If the forward lacks the main input that its
    class names, text or the first signal is the main input.
    """
    main = model.main_input_name
    mains = {main} if isinstance(main, str) else set(main)
    if not mains & set(parameters):
        mains = set([name for name in ("input_ids", *SIGNALS) if name in parameters][:1])
    future = {name for name in parameters if name.startswith("future_") and "past_time_features" in parameters}
    needed = _required(parameters) | (mains | future) & set(parameters)
    if IMAGES in needed and PATCH_POSITIONS & set(parameters):
        needed |= (PATCH_POSITIONS | {"pixel_attention_mask"}) & set(parameters)
    return frozenset(needed)


def _required(parameters: Parameters) -> set[str]:
    """Names of the parameters without a default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, value in parameters.items() if value.default is value.empty and value.kind in kinds}


def _has_two_towers(config: PretrainedConfig) -> bool:
    """Whether images or sound are separate inputs, as for CLIP, instead of replacing tokens of a text."""
    replaces = any(hasattr(config, f"{name}_token_{kind}") for name in ("image", "audio") for kind in ("id", "index"))
    has_tower = hasattr(config, "vision_config") or hasattr(config, "audio_config")
    return hasattr(config, "text_config") and has_tower and not replaces


def _memories(config: PretrainedConfig, batch: int, seq: int) -> dict[str, Tensor]:
    """The longest memories `[batch, memory, hidden]` that positions permit with `seq` tokens; empty without memory."""
    if not isinstance(config, SegmentConfig) or not config.memory_length:
        return {}
    length = min(config.memory_length, config.max_position_embeddings - seq)
    names = memory_names(config.num_hidden_layers)
    return {name: torch.randn(batch, length, config.hidden_size) for name in names}


def _target(folder: ModelFolder, batch: int, seq: int) -> Tensor:
    """Decoder input ids `[batch, seq]`, shorter if the decoder has fewer positions."""
    config = folder.model.config
    limit = getattr(config, "max_target_positions", None) or seq
    ordinary = ordinary_ids(config, vocabulary_size(config, folder.model), text_tokenizer(folder))
    ids = torch.from_numpy(ordinary[_draw(len(ordinary), batch, min(seq, limit))])
    start = getattr(config, "decoder_start_token_id", None)
    if start is not None:
        ids[:, 0] = start
    return ids


def _draw(limit: int, batch: int, seq: int) -> np.ndarray:
    """Whole numbers below a limit, drawn at random, `[batch, seq]`."""
    return np.asarray(torch.randint(limit, (batch, seq)))
