"""A model of transformers whose network is an engine: `generate` stays, and sessions run in place of the network."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from compressor.errors import ErrorCode, InputError
from compressor.targets.caches import Caches, Sessions

_IGNORED = frozenset(("return_dict", "labels", "cache_position", "decoder_position_ids"))
"""Arguments of a forward that change nothing here."""


class EngineCache(Cache):
    """The keys and values of an engine, as `generate` sees them."""

    is_croppable = False

    def __init__(self, caches: Caches) -> None:
        super().__init__(layers=[])
        self.caches = caches

    def __len__(self) -> int:
        return 1  # a cache without layers would be false

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions of the decoder that the cache holds."""
        return self.caches.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum, -1."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each text by the text at an index `[text]`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some texts, by their indices `[text]`."""
        self.caches = self.caches.select(indices.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each text."""
        self.caches = self.caches.select(np.repeat(np.arange(self.caches.batch), repeats))

    def crop(self, tokens_to_remove: int = 0) -> NoReturn:
        """Refuse.

        Raises:
            InputError: always, since an engine's cache only grows.
        """
        text = "the cache of an engine cannot be shortened; use greedy search, beams or sampling"
        raise InputError(text, code=ErrorCode.UNSUPPORTED)

    activate_past_recording = reset = crop


@dataclasses.dataclass
class _Encoded(ModelOutput):
    """What an encoder has read.

    Attributes:
        last_hidden_state: index of each text in `caches`, `[text, source position, 1]`: whatever repeats or selects
            the states of an encoder does so with these.
        caches: the caches of the texts.
    """

    last_hidden_state: Tensor | None = None
    caches: Caches | None = None

    @property
    def indices(self) -> Tensor:
        """Index of each text `[text, source position]`."""
        assert self.last_hidden_state is not None
        return self.last_hidden_state[:, :, 0]

    def of_texts(self) -> Caches:
        """The caches of the texts that are left, in their order."""
        assert self.caches is not None
        return self.caches.select(self.indices[:, 0].numpy())


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """The encoder of a model, which runs in a session."""

    sessions: Sessions
    main_input_name: str

    def forward(
        self,
        input_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> _Encoded:
        """Read texts or sounds; see `Sessions.encode`."""
        refuse(options)
        _require_values(input_ids if input_features is None else input_features)
        if input_ids is not None and attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        inputs = {"input_ids": input_ids, "input_features": input_features, "attention_mask": attention_mask}
        arrays = {name: tensor.numpy(force=True) for name, tensor in inputs.items() if tensor is not None}
        texts, *_, positions = arrays[self.main_input_name].shape
        indices = torch.arange(texts)[:, None, None].expand(-1, positions, 1)
        return _Encoded(indices, self.sessions.encode(arrays))

    __call__ = forward


class EngineModel(PreTrainedModel):
    """A model of transformers whose network is an engine; its weights do not exist.

    Attributes:
        sessions: the engine.
        generate: the method of the model's class.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    sessions: Sessions
    generate: Any

    @classmethod
    def of(cls, model: type[PreTrainedModel], config: PretrainedConfig, sessions: Sessions) -> EngineModel:
        """A model of a class of transformers, whose `generate` stays unchanged, with all that it calls."""

        _, *names = inspect.signature(model.forward).parameters

        @functools.wraps(model.forward)  # `generate` looks up which arguments a forward has
        def forward(self: EngineModel, *values: Any, **inputs: Any) -> CausalLMOutputWithPast:
            return cls._decode(self, **dict(zip(names[: len(values)], values, strict=True)), **inputs)

        generation: Any = model

        @functools.wraps(generation.generate)
        def generate(self: EngineModel, *inputs: Any, **options: Any) -> Any:
            with _one_thread():
                return generation.generate(self, *inputs, **options)

        with torch.device("meta"):
            engine: EngineModel = type(model.__name__, (cls, model), {"forward": forward, "generate": generate})(config)
        engine.sessions = sessions
        return engine.eval()

    def get_encoder(self, modality: str | None = None) -> Any:
        """The encoder, which runs in a session."""
        return _Encoder(self.sessions, self.main_input_name)

    def _decode(
        self,
        *,
        input_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: _Encoded | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[text, position, token]` of new tokens; arguments are those of the forward of the model."""
        refuse(options)
        tokens, mask = input_ids, attention_mask
        if self.config.is_encoder_decoder:
            if decoder_attention_mask is not None and not decoder_attention_mask.all():
                refuse({"decoder_attention_mask": decoder_attention_mask})
            if encoder_outputs is None:
                encoder_outputs = self.get_encoder().forward(input_ids, input_features, attention_mask)
            if not isinstance(encoder_outputs, _Encoded):
                refuse({"encoder_outputs": encoder_outputs})
            tokens = decoder_input_ids
            if mask is None:
                mask = torch.ones_like(encoder_outputs.indices)
        _require_values(tokens)
        assert tokens is not None
        if isinstance(past_key_values, EngineCache):
            caches = past_key_values.caches
        elif past_key_values is not None and past_key_values.get_seq_length() > 0:
            refuse({"past_key_values": past_key_values})
        elif encoder_outputs is not None:
            caches = encoder_outputs.of_texts()
        else:
            caches = self.sessions.start(len(tokens))
        if not self.config.is_encoder_decoder:
            if mask is None:
                mask = torch.ones(len(tokens), caches.length + tokens.shape[1], dtype=torch.long)
            if position_ids is None:
                position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            position_ids = position_ids.expand(len(tokens), -1)
        logits, caches = self.sessions.decode(_array(tokens), _array(mask), _array(position_ids), caches)
        cache = past_key_values if isinstance(past_key_values, EngineCache) else EngineCache(caches)
        cache.caches = caches
        return CausalLMOutputWithPast(
            logits=torch.from_numpy(logits[:, -logits_to_keep:]), past_key_values=None if use_cache is False else cache
        )

    def _postprocess_outputs(self, seek_outputs: Any, **options: Any) -> Any:
        """That of Whisper, without the cache, which Whisper takes apart by layers."""
        if isinstance(seek_outputs, ModelOutput):
            kept = {name: value for name, value in seek_outputs.items() if name != "past_key_values"}
            seek_outputs = type(seek_outputs)(**kept)
        return super()._postprocess_outputs(seek_outputs=seek_outputs, **options)  # type: ignore[misc]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, PyTorch computes in one thread: further ones and those of the runtime wait actively for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def refuse(options: Mapping[str, Any]) -> None:
    """Refuse arguments and options that an engine does not have.

    Args:
        options: name -> value; None, False and empty mappings are accepted. Transformers passes an empty
            `mm_encoder_outputs` where there are no images.

    Raises:
        InputError: an option has another value.
    """
    for name, value in options.items():
        is_empty = value is None or value is False or (isinstance(value, Mapping) and not value)
        if not is_empty and name not in _IGNORED:
            text = f"{name}: an engine does not support this option; omit it"
            raise InputError(text, code=ErrorCode.UNSUPPORTED, field=name)


def _require_values(inputs: Tensor | None) -> None:
    """Raise InputError for a batch without a text, or texts without a token, which a runtime may not survive."""
    if inputs is None or not inputs.numel():
        shape = None if inputs is None else tuple(inputs.shape)
        text = f"the inputs have the shape {shape}; pass at least one text of at least one token"
        raise InputError(text, code=ErrorCode.MISSING_VALUE, shape=shape)


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.numpy(force=True)
