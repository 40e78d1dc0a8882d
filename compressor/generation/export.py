"""Export a model that generates, with its key/value caches as inputs and outputs of the graphs.

A decoder-only model becomes one graph, which takes any number of new tokens after any number of earlier positions:

    input_ids, attention_mask, position_ids, past_key_values.N.key|value -> logits, present.N.key|value

An encoder-decoder becomes two. The encoder also computes the keys and values that the decoder's cross-attentions read,
once for each text; the decoder never sees the states of the encoder:

    encoder: input_ids | input_features, attention_mask -> present.N.encoder.key|value
    decoder: input_ids, encoder_attention_mask, past_key_values.N.decoder|encoder.key|value
             -> logits, present.N.decoder.key|value

Names of inputs and outputs are those of Optimum's exports. Which of them are caches is recorded in the metadata
(`graph_passes.flow.caches`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from compressor.errors import ErrorCode, InputError
from compressor.export import deployment_mode, drop_exporter_metadata, trace_gated
from compressor.silence_libraries import one_line
from compressor.targets.caches import DECODER, ENCODER
from compressor.units.hook import Attention, family, unwrap
from graph_passes import Plan, save
from graph_passes.flow.caches import Cache, record_caches
from graph_passes.passes import NameSqueezedAxes
from graph_passes.passes.insert_gates import FINGERPRINT

BATCH, PAST, NEW, SOURCE = "batch", "past", "sequence", "source"
"""Names of the free axes: texts, earlier positions, new positions, positions of the encoder."""
_SIZES = {BATCH: 2, PAST: 5, NEW: 3, SOURCE: 7}
"""Sizes of the axes in the example that a graph is traced with: all differ, and none is one."""

Axes = tuple[str | int, ...]
"""The axes of a tensor: the name of a free one, or a fixed size."""
_IDS = (BATCH, NEW)
_TOTAL = f"{PAST} + {NEW}"
"""Earlier and new positions together."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """One graph of a model.

    Attributes:
        forward: what the graph computes, from `sample`; returns its outputs in order.
        sample: name of an argument of `forward` -> the tensors that it is traced with, one or a list.
        inputs: name of each input of the graph -> its axes, in the order of the tensors in `sample`.
        outputs: name of each output -> its axes, in order.
        caches: names of the input and the output of each cache.
    """

    forward: Callable[..., list[Tensor]]
    sample: Mapping[str, Tensor | list[Tensor]]
    inputs: Mapping[str, Axes]
    outputs: Mapping[str, Axes]
    caches: tuple[Cache, ...] = ()

    @property
    def dynamic_shapes(self) -> dict[str, Any]:
        """The free axes of each argument, as `torch.export` takes them."""
        free = iter(
            {axis: Dim.AUTO for axis, size in enumerate(axes) if isinstance(size, str)} for axes in self.inputs.values()
        )
        return {
            name: [next(free) for _ in value] if isinstance(value, list) else next(free)
            for name, value in self.sample.items()
        }

    def name_values(self, program: ir.Model) -> None:
        """Give the inputs, the outputs and their axes the names of this part, and record the caches."""
        graph = program.graph
        for values, named in ((graph.inputs, self.inputs), (graph.outputs, self.outputs)):
            for value, (name, axes) in zip(values, named.items(), strict=True):
                value.name = name
                value.shape = ir.Shape(axes)
        record_caches(program, self.caches)


def export_generation(
    model: PreTrainedModel,
    plan: Plan,
    folder: str | os.PathLike[str],
    *,
    opset: int = 18,
    attention: Attention = "eager",
) -> tuple[str, ...]:
    """Write the gated graphs of a model that generates: `decoder.onnx`, and before it `encoder.onnx` if it has one.

    Heads and neurons are multiplied by gates, initializers `<group>.head_gate` and `<group>.neuron_gate`; weights have
    the names of the state dict. Batch, earlier positions and new positions are free axes, heads are fixed numbers.

    Args:
        model: a transformers model with a language model head, whose state is restored.
        plan: one entry for each attention of the model, and for feed-forwards.
        folder: the folder to write to, which exists.
        opset: version of the ONNX operator set, 18 or 23.
        attention: the form of attention in the graphs, `eager` or `sdpa`.

    Returns:
        The names of the files, in the order in which they run.

    Raises:
        InputError: the model keeps another state than keys and values, or cannot be exported.
        OSError: the disk is full or the folder cannot be written.
    """
    model = unwrap(model)
    with deployment_mode(model):
        parts = _encoder_decoder(model) if model.config.is_encoder_decoder else {DECODER: _decoder_only(model)}
        for name, part in parts.items():
            with _forward_of(model, part.forward):
                program = trace_gated(model, plan, part.sample, part.dynamic_shapes, opset=opset, attention=attention)
            part.name_values(program)
            NameSqueezedAxes()(program)
            drop_exporter_metadata(program)
            if plan.model is not None:
                program.metadata_props[FINGERPRINT] = plan.model
            save(program, Path(folder) / name)
    return tuple(parts)


def _decoder_only(model: PreTrainedModel) -> _Part:
    original = type(model).forward
    ids = _ids(model, _SIZES[PAST] + _SIZES[NEW])
    kept = _cache_after(model, input_ids=ids[:, : _SIZES[PAST]])
    past = _earlier(getattr(kept, "self_attention_cache", kept), model)  # a decoder that can have an encoder has both

    def forward(**inputs: Any) -> list[Tensor]:
        result = original(model, **{**inputs, "past_key_values": _cache(inputs["past_key_values"])}, use_cache=True)
        return [result.logits, *_tensors(result.past_key_values)]

    mask = torch.ones_like(ids)
    mask[-1, 0] = 0  # a mask of ones would not be in the graph
    sample: dict[str, Any] = {"input_ids": ids[:, _SIZES[PAST] :], "attention_mask": mask}
    inputs: dict[str, Axes] = {"input_ids": _IDS, "attention_mask": (BATCH, _TOTAL)}
    if "position_ids" in inspect.signature(original).parameters:
        sample["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, _SIZES[PAST] :]
        inputs["position_ids"] = _IDS
    sample["past_key_values"] = past
    caches = _caches(len(past), "")
    inputs |= _axes_by_name(caches, 0, past, PAST)
    outputs: dict[str, Axes] = {"logits": (*_IDS, _vocabulary(model))} | _axes_by_name(caches, 1, past, _TOTAL)
    return _Part(forward, sample, inputs, outputs, caches)


def _encoder_decoder(model: PreTrainedModel) -> dict[str, _Part]:
    original, source = type(model).forward, model.main_input_name
    sound = source != "input_ids"
    start = _ids(model, _SIZES[PAST] + _SIZES[NEW])
    mask = torch.ones(_SIZES[BATCH], _SIZES[SOURCE], dtype=torch.long)
    mask[-1, -1] = 0  # a mask of ones would not be in the graph

    def encode(**inputs: Any) -> list[Tensor]:
        encoded = model.get_encoder()(**inputs)
        result = original(
            model,
            encoder_outputs=encoded,
            decoder_input_ids=start[:1, :1].expand(encoded[0].shape[0], 1),  # any token: what it gives is not returned
            past_key_values=_empty_caches(),
            use_cache=True,
            attention_mask=inputs.get("attention_mask"),
        )
        return _tensors(result.past_key_values.cross_attention_cache)

    axes: Axes = (BATCH, *_sound_shape(model)) if sound else (BATCH, SOURCE)
    if sound:
        encoder_sample = {source: torch.randn(_SIZES[BATCH], *_sound_shape(model))}
    else:
        encoder_sample = {source: _ids(model, _SIZES[SOURCE]), "attention_mask": mask}
    encoded = _run(model, model.get_encoder(), **encoder_sample)
    read = {**encoder_sample, "decoder_input_ids": start[:, : _SIZES[PAST]], "past_key_values": _empty_caches()}
    kept = _cache_after(model, **read, encoder_outputs=encoded)
    past = _earlier(getattr(kept, "self_attention_cache", None), model)
    cross = _layers(getattr(kept, "cross_attention_cache", None), model)
    width, positions = encoded[0].shape[-1], cross[0].shape[2]

    def decode(
        input_ids: Tensor,
        self_cache: list[Tensor],
        cross_cache: list[Tensor],
        encoder_attention_mask: Tensor | None = None,
    ) -> list[Tensor]:
        # Only the shape of the states is read, since their keys and values are in the cache.
        states = cross_cache[0].new_zeros(input_ids.shape[0], cross_cache[0].shape[2], width)
        result = original(
            model,
            encoder_outputs=type(encoded)(last_hidden_state=states),
            decoder_input_ids=input_ids,
            past_key_values=EncoderDecoderCache(_cache(self_cache), _cache(cross_cache)),
            use_cache=True,
            attention_mask=encoder_attention_mask,
        )
        return [result.logits, *_tensors(result.past_key_values.self_attention_cache)]

    sample: dict[str, Any] = {"input_ids": start[:, _SIZES[PAST] :]}
    inputs: dict[str, Axes] = {"input_ids": _IDS}
    if not sound:
        sample["encoder_attention_mask"] = mask
        inputs["encoder_attention_mask"] = (BATCH, SOURCE)
    sample |= {"self_cache": past, "cross_cache": cross}
    caches, computed = _caches(len(past), ".decoder"), _caches(len(cross), ".encoder")
    free = positions if sound else SOURCE
    inputs |= _axes_by_name(caches, 0, past, PAST) | _axes_by_name(computed, 0, cross, free)
    outputs: dict[str, Axes] = {"logits": (*_IDS, _vocabulary(model))} | _axes_by_name(caches, 1, past, _TOTAL)
    encoder_inputs, returned = dict.fromkeys(encoder_sample, axes), _axes_by_name(computed, 1, cross, free)
    return {
        ENCODER: _Part(encode, encoder_sample, encoder_inputs, returned),
        DECODER: _Part(decode, sample, inputs, outputs, caches + computed),
    }


@contextlib.contextmanager
def _forward_of(model: PreTrainedModel, forward: Callable[..., list[Tensor]]) -> Iterator[None]:
    """Inside, the model computes another forward, with the modules and the names of weights that it has."""
    model.forward = lambda **inputs: dict(zip(map(str, itertools.count()), forward(**inputs), strict=False))
    try:
        yield
    finally:
        del model.forward


def _cache_after(model: PreTrainedModel, **inputs: Any) -> Any:
    """The cache after a forward; None: the model returns none."""
    result = _run(model, partial(type(model).forward, model), **inputs, use_cache=True)
    return getattr(result, "past_key_values", None)


def _run(model: PreTrainedModel, module: Callable[..., Any], **inputs: Any) -> Any:
    """What a model, or its encoder, returns for an example; the forward of some models takes no cache, and raises."""
    try:
        with torch.no_grad():
            return module(**inputs)
    except Exception as error:  # model code can raise any type
        text = (
            f"{family(model)}: the model does not run with a cache ({type(error).__name__}: {one_line(error)}), so only"
            " the graph that reads a whole text at once can be exported"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, family=family(model)) from error


def _empty_caches() -> EncoderDecoderCache:
    """The caches before the first token. Those that transformers makes have as many layers as the encoder has."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def _ids(model: PreTrainedModel, length: int) -> Tensor:
    """Token ids `[batch, length]` that are no special tokens of most tokenizers."""
    size = _vocabulary(model)
    return torch.arange(_SIZES[BATCH] * length).reshape(_SIZES[BATCH], length) % max(1, size // 2) + size // 4


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _sound_shape(model: PreTrainedModel) -> tuple[int, ...]:
    """Channels and frames of the sound that an encoder takes; InputError if it takes sounds of any length."""
    channels, frames = (getattr(model.config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if channels is None or frames is None:
        text = (
            f"{family(model)}: the encoder reads sounds of any length, but graphs with caches need a fixed length"
            " (num_mel_bins and max_source_positions in config.json)"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, family=family(model))
    for convolution in (module for module in model.get_encoder().modules() if isinstance(module, torch.nn.Conv1d)):
        frames *= convolution.stride[0]
    return int(channels), int(frames)


def _layers(cache: TransformersCache | None, model: PreTrainedModel) -> list[Tensor]:
    """Keys and values of each layer, one after the other; raises InputError if a layer keeps something else."""
    if cache is None:
        text = f"{family(model)}: the model returns no past_key_values, which graphs with caches need"
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, family=family(model))
    for index, layer in enumerate(cache.layers if type(cache) is DynamicCache else [cache]):
        is_plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)  # classes derived from them keep more
        keys = getattr(layer, "keys", None)
        if not is_plain or keys is None or keys.dim() != 4:
            text = (
                f"{family(model)}: layer {index} keeps {type(layer).__name__}, but graphs with caches hold only keys"
                " and values"
            )
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, family=family(model), layer=index)
    return _tensors(cache)


def _earlier(cache: TransformersCache | None, model: PreTrainedModel) -> list[Tensor]:
    """Empty keys and values of each layer for all earlier positions, of which a layer with a window keeps the last."""
    return [tensor.new_zeros(*tensor.shape[:2], _SIZES[PAST], tensor.shape[3]) for tensor in _layers(cache, model)]


def _tensors(cache: TransformersCache) -> list[Tensor]:
    layers: Sequence[Any] = cache.layers
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def _cache(tensors: Sequence[Tensor]) -> DynamicCache:
    return DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))


def _caches(tensors: int, part: str) -> tuple[Cache, ...]:
    names = [f"{index // 2}{part}.{('key', 'value')[index % 2]}" for index in range(tensors)]
    return tuple((f"past_key_values.{name}", f"present.{name}") for name in names)


def _axes_by_name(
    caches: Sequence[Cache], side: int, tensors: Sequence[Tensor], positions: str | int
) -> dict[str, Axes]:
    """Name of the input (side 0) or the output (1) of each cache -> its axes."""
    return {
        cache[side]: (BATCH, tensor.shape[1], positions, tensor.shape[3])
        for cache, tensor in zip(caches, tensors, strict=True)
    }
