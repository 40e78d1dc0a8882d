"""Forms of functions of transformers whose exported graph runs at any length, and with any number of images.

The recurrences of linear attention and state space models loop over positions or chunks, or cut padding off if there is
any; torch.export keeps the loop and the branch of the example. Their forms do the same arithmetic with the operator
`scan` instead of a loop.

SigLIP 2 resizes the position embeddings of each image in a loop, which torch.export unrolls for the example's batch.
Bilinear resizing with antialiasing is a weighted mean of the embeddings for each patch, i.e. a matmul for all images.

Dynamic rotary embeddings (NTK) recompute their frequencies in a branch on the longest text so far, which torch.export
cannot trace. Their form computes both frequencies for the present text, and selects by its length.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.fx.experimental import _config as shape_settings
from transformers.exporters.utils import patch_attribute, patch_attributes
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from compressor.errors import CompressorError, InputError
from compressor.model_folder.text_limits import DYNAMIC
from compressor.units.hook import Attention

Function = Callable[..., Any]
"""A function or a method of transformers."""


def cut_to_length(chunk_scan: Function) -> Function:
    """Mamba 2 with its output cut to the length of the text, even if the example's last chunk has no padding."""

    @functools.wraps(chunk_scan)
    def scan_and_cut(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        result = chunk_scan(hidden_states, *args, **kwargs)
        output, *state = result if isinstance(result, tuple) else (result,)
        output = output[:, : hidden_states.shape[1]]
        return (output, *state) if state else output

    return scan_and_cut


def _step(state: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A position of a recurrence: the next state, and a copy of it as output."""
    decay, update = inputs
    state = decay * state + update
    return state, state.clone()


def selective_scan(_: Function) -> Function:
    """Mamba 1 as a `scan` of positions."""

    def selective_scan(
        hidden_states: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        if (delta_bias := options.get("delta_bias")) is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if options.get("delta_softplus"):
            dt = nn.functional.softplus(dt)
        # `scan` runs along the first axis: [position, batch, channel, state].
        steps, channels = (tensor.permute(2, 0, 1)[..., None] for tensor in (dt, hidden_states))
        writes, reads = b.permute(2, 0, 1), c.permute(2, 0, 1)
        updates = steps * writes[:, :, None].float() * channels.float()
        last, states = scan(_step, torch.zeros_like(updates[0]), (torch.exp(a * steps), updates))
        output = torch.matmul(states.to(hidden_states.dtype), reads[..., None])[..., 0].permute(1, 2, 0)
        if (skip := options.get("D")) is not None:
            output = output + hidden_states * skip[None, :, None]
        if (z := options.get("z")) is not None:
            output = output * nn.functional.silu(z)
        return (output, last) if options.get("return_last_state") else output

    return selective_scan


def linear_recurrence(_: Function) -> Function:
    """The linear recurrent unit of Griffin as a `scan` of positions."""

    def linear_recurrence(
        _: nn.Module,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        decays = (recurrent_gate * ~reset).to(acc_dtype).transpose(0, 1)
        updates = hidden_states.to(acc_dtype).transpose(0, 1)
        start = torch.zeros_like(updates[0]) if recurrent_states is None else recurrent_states.to(updates)
        last, states = scan(_step, start, (decays, updates))
        return states.transpose(0, 1).to(hidden_states.dtype), last

    return linear_recurrence


def chunk_by_chunk(rule: Function) -> Function:
    """A delta rule as a `scan` of its chunks, each of which starts from the state after the previous chunk."""

    @functools.wraps(rule)
    def scan_chunks(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, length, heads, width = value.shape
        count = (length + chunk_size - 1) // chunk_size
        chunks = tuple(_chunks(part, count, chunk_size) for part in (query, key, value, g, beta))
        if initial_state is None:
            initial_state = value.new_zeros(batch, heads, key.shape[-1], width)

        def step(state: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            output, state = rule(
                *inputs, chunk_size=chunk_size, initial_state=state, output_final_state=True, **options
            )
            return state, output

        last, outputs = scan(step, initial_state.float(), chunks)
        output = outputs.transpose(0, 1).reshape(batch, count * chunk_size, heads, width)[:, :length]
        return output, last if output_final_state else None

    return scan_chunks


def _chunks(part: Tensor, count: int, size: int) -> Tensor:
    """The chunks of `[batch, position, ...]`, the last padded by zeros, as `[chunk, batch, position, ...]`."""
    rest = part.shape[2:]
    padded = nn.functional.pad(part, (0, 0) * len(rest) + (0, count * size - part.shape[1]))
    return padded.reshape(part.shape[0], count, size, *rest).transpose(0, 1)


def resized_at_once(resize: Function) -> Function:
    """The form of SigLIP 2's `resize_positional_embeddings`; functions of that name with other inputs stay."""
    return resize_positions if "spatial_shapes" in inspect.signature(resize).parameters else resize


def resize_positions(positional_embeddings: Tensor, spatial_shapes: Tensor, max_length: int) -> Tensor:
    """Position embeddings of the patches of each image.

    Args:
        positional_embeddings: the table, `[row, column, width]`.
        spatial_shapes: rows and columns of the patches of each image, `[image, 2]`.
        max_length: patches of an image; those beyond `rows * columns` are padding and get the embedding of the first.

    Returns:
        `[image, patch, width]`, as `torch.nn.functional.interpolate` (`bilinear`, `antialias=True`) resizes the table;
        for images that are one patch wide, as it resizes the rows alone: PyTorch 2.13 gives these equal rows.
    """
    rows, columns, width = positional_embeddings.shape
    heights, widths = spatial_shapes[:, :1], spatial_shapes[:, 1:]
    patches = torch.arange(max_length, device=spatial_shapes.device)[None]
    patches = torch.where(patches < heights * widths, patches, 0)
    by_row = _weights(torch.div(patches, widths, rounding_mode="floor"), heights, rows)
    by_column = _weights(torch.remainder(patches, widths), widths, columns)
    weights = (by_row[..., :, None] * by_column[..., None, :]).flatten(-2)
    table = positional_embeddings.reshape(rows * columns, width)
    return (weights @ table.to(weights.dtype)).to(positional_embeddings.dtype)


def _weights(targets: Tensor, sizes: Tensor, count: int) -> Tensor:
    """Weights of `count` positions in the mean of each patch, `[image, patch, position]`, with sum one.

    They fall linearly with the distance from the patch, over the larger of a position and a patch. `targets` `[image,
    patch]` are positions after resizing, `sizes` `[image, 1]` their numbers.
    """
    scale = count / sizes.to(torch.float32)
    centers = (targets.to(torch.float32) + 0.5) * scale
    positions = torch.arange(count, device=targets.device, dtype=torch.float32) + 0.5
    distances = (positions - centers[..., None]).abs() / scale.clamp(min=1)[..., None]
    weights = (1 - distances).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def _buffer_name(layer_type: str | None, name: str) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


@contextlib.contextmanager
def frequencies_by_length(model: nn.Module) -> Iterator[None]:
    """Inside, dynamic rotary embeddings depend only on the present text; frequencies and types are restored on exit."""
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            types = (kinds if isinstance(kinds, dict) else {None: kinds}).items()
            buffers = {layer: _buffer_name(layer, "original_inv_freq") for layer, kind in types if kind == DYNAMIC}
            dynamic = [layer for layer, name in buffers.items() if hasattr(module, name)]
            if dynamic and hasattr(module, "original_max_seq_len"):
                undo.enter_context(_by_length(module, dynamic))
        yield


@contextlib.contextmanager
def _by_length(module: Any, layer_types: list[str | None]) -> Iterator[None]:
    """`frequencies_by_length` of a module and its types of layers with dynamic frequencies (None: all layers)."""

    def set_frequencies(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        layer_type = arguments.get("layer_type")
        if layer_type in layer_types:
            frequencies = _frequencies(module, arguments["position_ids"], layer_type)
            getattr(module, _buffer_name(layer_type, "inv_freq")).copy_(frequencies)

    def plain(former: Any) -> Any:
        """The type with which the module reads its frequencies without a branch."""
        return former | dict.fromkeys(layer_types, "default") if isinstance(former, dict) else "default"

    patches: list[tuple[Any, str, Any]] = [
        (module, _buffer_name(kind, "inv_freq"), torch.clone) for kind in layer_types
    ]
    with (
        patch_attributes([(module, "rope_type", plain), *patches]),
        module.register_forward_pre_hook(set_frequencies, with_kwargs=True),
    ):
        yield


def _frequencies(module: Any, positions: Tensor, layer_type: str | None) -> Tensor:
    """Frequencies for the longest text of a batch with `positions` `[batch, position]`, `[head_dim / 2]`."""
    length = torch.max(positions) + 1
    original = getattr(module, _buffer_name(layer_type, "original_inv_freq"))
    scaled, _ = ROPE_INIT_FUNCTIONS[DYNAMIC](module.config, positions.device, seq_len=length, layer_type=layer_type)
    return torch.where(length > module.original_max_seq_len, scaled, original.to(positions.device))


_FORMS: dict[str, Callable[[Function], Function]] = {
    "mamba2_chunk_scan": cut_to_length,
    "mamba_selective_scan": selective_scan,
    "_rnn_scan": linear_recurrence,
    "torch_chunk_gated_delta_rule": chunk_by_chunk,
    "chunk_kimi_delta_attention": chunk_by_chunk,
    "resize_positional_embeddings": resized_at_once,
}
"""Name of a function or method of transformers -> function from the original to its form."""


@contextlib.contextmanager
def any_length(model: nn.Module) -> Iterator[None]:
    """Inside, functions of a model have the forms that torch.export exports for inputs of any length.

    These are the functions and methods in `_FORMS` of the Python modules and classes of the model's parts, and dynamic
    rotary embeddings.
    """
    classes = {type(part) for part in model.modules()}
    modules = {module for cls in classes if (module := sys.modules.get(cls.__module__)) is not None}
    owners: tuple[type | ModuleType, ...] = (*classes, *modules)
    patches = [(owner, name, form) for owner in owners for name, form in _FORMS.items() if name in vars(owner)]
    with frequencies_by_length(model), contextlib.ExitStack() as undo:
        for patch in patches:
            undo.enter_context(_replaced(*patch))
        if patches:
            # Sizes of one, such as a single chunk, stay free too.
            undo.enter_context(patch_attribute(shape_settings, "backed_size_oblivious", lambda _: True))
            undo.enter_context(torch.no_grad())  # functions in `scan` may write in place, without gradients
        yield


@contextlib.contextmanager
def _replaced(owner: type | ModuleType, name: str, form: Callable[[Function], Function]) -> Iterator[None]:
    """Inside, an attribute has another form; a static method stays static."""
    original, replacement = vars(owner)[name], form(getattr(owner, name))
    setattr(owner, name, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def with_other_form(error: InputError, trace: Callable[[Attention], object], attention: Attention) -> InputError:
    """The error of an export in a form of attention, with the other form as remedy if `trace` can export it."""
    alternative: Attention = "sdpa" if attention == "eager" else "eager"
    try:
        trace(alternative)
    except CompressorError:
        text = "nor can the other form of attention; the exporter of transformers lacks this family"
        return InputError(f"{error}; {text}", code=error.code, remedy=None, **error.details)
    text = f"the other form of attention can be exported (--attention {alternative})"
    return InputError(f"{error}; {text}", code=error.code, remedy=alternative, **error.details)
