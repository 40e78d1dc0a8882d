"""Inputs of a model as arrays: those of its example, or made up in the layout that its processor produces."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import ErrorCode, InputError, suggestion
from compressor.model_folder.access import access_of
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.text_limits import image_tokens, takes_token_types, text_config, token_limit
from compressor.results import Size
from compressor.silence_libraries import quiet_transformers
from compressor.targets.base import Feeds
from compressor.targets.example_rows import ExampleRows, read_arrays

Draw = Callable[[int, int, int], np.ndarray]
"""Whole numbers below the first argument, drawn at random, `[batch, position]`."""
IMAGE_MASK = "image_embeds_position_mask"
"""Input of Kosmos-2 that is one at the tokens of an image."""
_PAIRS = ("question-answering", "multiple-choice")
"""Tasks whose examples are two texts."""
_ROWS, _LENGTH = 4, 32
"""Rows that a graph carries, and their maximum number of tokens."""
_ATTEMPTS = 16
"""Number of ordinary tokens that are tried as a text."""


def example_feeds(folder: ModelFolder, batch: int, seq: int | None, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a model by name, `[batch, ...]` each: those of its example, or made up.

    Token ids `[batch, seq]` int64 have special tokens where the examples of the task have them, else where the
    tokenizer puts them, around two texts if the model distinguishes two; ordinary tokens are random. The last of
    several examples is padded on the right, so that the mask has an effect.

    Args:
        seq: tokens of an example, of source and target alike; it has no effect if the model has a single size.

    Raises:
        InputError: the model reads fewer than `seq` tokens, or needs an input that no rule generates.
    """
    seq = folder.access.text_length or seq or 1
    if folder.example:
        return _rows_of(folder, folder.example).sized(batch, seq, first=seed)
    return folder.access.make_feeds(folder, batch, seq, seed)


def example_feeds_by_size(folder: ModelFolder, sizes: Iterable[tuple[int, int | None]]) -> dict[Size, Feeds]:
    """Inputs for an engine by batch size and length, in the order of `sizes`; see `example_feeds`."""
    return {Size(batch, seq): example_feeds(folder, batch, seq) for batch, seq in sizes}


def read_example(path: str | Path, model: Any) -> dict[str, np.ndarray]:
    """The arrays of an .npz file as inputs of a model, `[example, ...]` float32 or int64, with equally many examples.

    Raises:
        InputError: the file is missing or damaged, an array is not an input of the model, or arrays have no examples or
            differ in their number.
    """
    path = Path(path)
    if not path.is_file():
        text = "no such file; write the inputs of the model with numpy.savez"
        raise InputError.of_file(path, text, ErrorCode.FILE_MISSING, field="inputs")
    arrays = read_arrays(path)
    parameters = access_of(model).inputs
    for name, array in arrays.items():
        if name not in parameters:
            raise _mismatch(path, name, f"{type(model).__name__} has no such input; {suggestion(name, parameters)}")
        if array.dtype.kind not in "fiub" or not array.ndim or not array.size:
            raise _mismatch(path, name, f"{array.dtype} {list(array.shape)} has no rows of numbers; give them")
        if len(array) != len(next(iter(arrays.values()))):
            raise _mismatch(path, name, f"{len(array)} rows, others have another number; give equally many")
    if not arrays:
        raise _mismatch(path, "", "the file has no arrays; give one for each input of the model")
    kinds = {"f": np.float32, "b": np.bool_}
    return {name: np.ascontiguousarray(array, kinds.get(array.dtype.kind, np.int64)) for name, array in arrays.items()}


def _mismatch(path: Path, name: str, problem: str) -> InputError:
    return InputError(
        f"{path}: {name}: {problem}" if name else f"{path}: {problem}",
        code=ErrorCode.TENSOR_MISMATCH,
        path=path,
        field="inputs",
        tensor=name,
    )


def takes_text(folder: ModelFolder) -> bool:
    """Whether the encoder or the decoder reads tokens, of several lengths."""
    return folder.access.text_length is None and any(
        name.endswith("input_ids") for name in example_feeds(folder, batch=1, seq=2)
    )


def example_rows(folder: ModelFolder) -> ExampleRows:
    """The inputs that a graph of the model carries: those of its example, else `example_feeds`."""
    if folder.example:
        return _rows_of(folder, {name: value[:_ROWS] for name, value in folder.example.items()})
    rows = _rows_of(folder, example_feeds(folder, _ROWS, min(_LENGTH, token_limit(folder.model) or _LENGTH)))
    return dataclasses.replace(rows, image_positions=len(image_tokens(folder.config)))


def _rows_of(folder: ModelFolder, inputs: Mapping[str, np.ndarray]) -> ExampleRows:
    """Inputs with the ids among them that are markers."""
    ids = {token for name, array in inputs.items() if name.endswith("input_ids") for token in np.unique(array).tolist()}
    if not ids:
        return ExampleRows(inputs)
    if folder.processor is None and folder.example:
        return _rows_without_tokenizer(inputs)
    layout, ordinary = _layout(folder)
    return ExampleRows(inputs, frozenset(ids - set(ordinary.tolist())), layout.padding)


def _rows_without_tokenizer(inputs: Mapping[str, np.ndarray]) -> ExampleRows:
    """Inputs of a model without a tokenizer: ids that every row has are markers, and padding is what the mask hides."""
    ids = next(array for name, array in inputs.items() if name.endswith("input_ids"))
    mask = next((array for name, array in inputs.items() if name.endswith("attention_mask")), None)
    hidden = ids[mask == 0] if mask is not None and mask.shape == ids.shape else ids[:0]
    padding = int(hidden[0]) if hidden.size else 0
    shared = set.intersection(*(set(row.tolist()) for row in ids)) - {padding} if len(ids) > 1 else set()
    return ExampleRows(inputs, frozenset(shared), padding)


def cannot_make(folder: ModelFolder, reason: str, **details: Any) -> InputError:
    name = type(folder.model).__name__
    return InputError.of_file(
        folder.path,
        f"{name} {reason}; give inputs that it runs on (--inputs FILE.npz)",
        ErrorCode.UNSUPPORTED_MODEL,
        **details,
    )


def text_feeds(folder: ModelFolder, batch: int, seq: int, names: Collection[str], draw: Draw) -> dict[str, np.ndarray]:
    """Token ids `[batch, seq]` after the tokens of an image, and the mask and token types if the model reads them.

    Raises:
        InputError: the model reads fewer tokens.
    """
    limit = token_limit(folder.model)
    if limit is not None and seq > limit:
        raise InputError.of_file(
            folder.path,
            f"the model reads at most {limit} tokens, {seq} were requested; lower --seq",
            ErrorCode.OUT_OF_RANGE,
            field="seq",
            value=seq,
            maximum=limit,
        )
    layout, ordinary = _layout(folder)
    row = layout.sized(batch, seq, padded=(batch - 1,) if batch > 1 and seq > 1 else ())
    mask, ids = row["attention_mask"], row["input_ids"]
    is_ordinary = ~np.isin(ids, list(layout.markers)) & (mask == 1)
    ids = np.where(is_ordinary, ordinary[draw(len(ordinary), batch, seq)], ids)
    image = np.array(image_tokens(folder.config), np.int64)
    inputs = {"input_ids": np.concatenate([np.tile(image, (batch, 1)), ids], axis=1)}
    before = ((0, 0), (len(image), 0))
    if "attention_mask" in names:
        inputs["attention_mask"] = np.pad(mask, before, constant_values=1)
    if IMAGE_MASK in names and len(image):
        inputs[IMAGE_MASK] = np.tile(np.arange(len(image) + seq) < len(image), (batch, 1))
    if takes_token_types(folder.model, text_tokenizer(folder)):
        inputs["token_type_ids"] = np.pad(row["token_type_ids"], before)
    return inputs


def _layout(folder: ModelFolder) -> tuple[ExampleRows, np.ndarray]:
    """A text with its special tokens and placeholders for ordinary ones, and the ids of ordinary tokens."""
    config, tokenizer = text_config(folder.config), text_tokenizer(folder)
    pair = folder.task in _PAIRS or takes_token_types(folder.model, tokenizer)
    size = vocabulary_size(config, folder.model)
    ordinary = ordinary_ids(folder.config, size, tokenizer)
    layout = folder.layout or _tokenizer_layout(tokenizer, ordinary, pair=pair)
    if layout is None or (folder.layout is None and not layout.markers):
        first, last = (_special_id(config, tokenizer, size, *names) for names in (("bos", "cls"), ("eos", "sep")))
        text, markers = int(ordinary[0]), [token for token in (first, last) if token is not None]
        ids = np.array([token for token in (first, text, text, last) if token is not None])
        types = (np.arange(len(ids)) >= len(ids) / 2).astype(np.int64)
        layout = _row_of_ids(ids, types, np.isin(ids, markers), text)
    layout = dataclasses.replace(layout, padding=_special_id(config, tokenizer, size, "pad") or 0)
    unmarked = np.setdiff1d(ordinary, list(layout.markers))
    return layout, unmarked if len(unmarked) else ordinary


def _tokenizer_layout(tokenizer: Any, ordinary: np.ndarray, *, pair: bool) -> ExampleRows | None:
    """A text or a pair that a tokenizer encodes; None if it cannot encode tokens of its vocabulary."""
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return None
    for number in np.linspace(len(ordinary) - 1, 0, min(_ATTEMPTS, len(ordinary)), dtype=int):
        try:
            with quiet_transformers():
                text = tokenizer.decode([int(ordinary[number])])
                texts = (text, text) if pair else (text,)
                row = tokenizer(*texts, return_special_tokens_mask=True, return_token_type_ids=True)
        except Exception:  # a text that a tokenizer cannot encode can raise any error
            continue
        ids, is_marker = np.array(row["input_ids"]), np.array(row["special_tokens_mask"], bool)
        if np.count_nonzero(~is_marker) >= len(texts):
            types = np.array(row.get("token_type_ids", np.zeros_like(ids)))
            return _row_of_ids(ids, types, is_marker, int(ordinary[number]))
    return None


def rows_layout(rows: Iterable[Mapping[str, Any]], folder: ModelFolder) -> ExampleRows | None:
    """The layout that most examples of a task have: special tokens, and placeholders for ordinary ones.

    Args:
        rows: examples with `input_ids`, of which the first window or text is read.
        folder: its special and added tokens are markers, except that of unknown words.

    Returns:
        One example; None if no example has an ordinary token.
    """
    config, tokenizer = text_config(folder.config), text_tokenizer(folder)
    placeholder = int(ordinary_ids(folder.config, vocabulary_size(config, folder.model), tokenizer)[0])
    markers = _marker_ids(config, tokenizer) - {getattr(tokenizer, "unk_token_id", None)}
    layouts = []
    for row in rows:
        ids, types = (_first_row(row.get(name)) for name in ("input_ids", "token_type_ids"))
        is_marker = np.isin(ids, list(markers))
        if ids.dtype.kind == "i" and not is_marker.all():
            kinds = types if types.shape == ids.shape else np.zeros_like(ids)
            layouts.append(_row_of_ids(ids, kinds, is_marker, placeholder))
    if not layouts:
        return None
    rows_of_ids = [(layout.inputs["input_ids"][0], list(layout.markers)) for layout in layouts]
    shapes = [tuple(ids[np.isin(ids, marked)].tolist()) for ids, marked in rows_of_ids]
    (most, _), *_ = Counter(shapes).most_common(1)
    return layouts[shapes.index(most)]


def _first_row(content: Any) -> np.ndarray:
    """The first list of numbers in a cell; empty for another cell."""
    while isinstance(content, Sequence) and content and isinstance(content[0], Sequence | np.ndarray):
        content = content[0]
    array = np.array([] if content is None else content)
    return array if array.ndim == 1 else array.reshape(-1)


def _row_of_ids(ids: np.ndarray, types: np.ndarray, is_marker: np.ndarray, placeholder: int) -> ExampleRows:
    row = np.where(is_marker, ids, placeholder)
    inputs = {"input_ids": row[None], "attention_mask": np.ones_like(row)[None], "token_type_ids": types[None]}
    return ExampleRows(inputs, frozenset(row[is_marker].tolist()) - {placeholder})


def text_tokenizer(folder: ModelFolder) -> Any:
    """The tokenizer of a folder, which may be a part of its processor; its processor, or None, without a tokenizer."""
    return getattr(folder.processor, "tokenizer", folder.processor)


def _marker_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    """Ids of special and added tokens, by the configuration and the tokenizer."""
    values = [value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))]
    ids = [item for value in values for item in (value if isinstance(value, list) else [value])]
    added = getattr(tokenizer, "added_tokens_decoder", None)
    ids += [*getattr(tokenizer, "all_special_ids", ()), *(added if isinstance(added, Mapping) else ())]
    return frozenset(item for item in ids if isinstance(item, int))


def ordinary_ids(config: Any, size: int, tokenizer: Any) -> np.ndarray:
    """Ids below `size` that are not those of special or added tokens; all ids if no others exist."""
    known = len(tokenizer) if hasattr(tokenizer, "convert_ids_to_tokens") else size
    ordinary = np.setdiff1d(np.arange(min(size, known)), list(_marker_ids(config, tokenizer)))
    return ordinary if len(ordinary) else np.arange(size)


def vocabulary_size(config: Any, model: Any) -> int:
    """Number of ids that a model, or its decoder, reads: that of the configuration, else of the first embeddings.

    Raises:
        InputError: the model has no embeddings.
    """
    for part in (config, config.get_text_config(decoder=True), text_config(config)):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    if (size := access_of(model).table_size) is not None:
        return size
    raise InputError(
        f"{config.model_type}: the configuration has no vocab_size, from which ids could be drawn; give inputs that the"
        " model runs on (--inputs FILE.npz)",
        code=ErrorCode.UNSUPPORTED_MODEL,
        family=config.model_type,
    )


def _special_id(config: Any, tokenizer: Any, size: int, *names: str) -> int | None:
    """The id of the first of `names` (`bos`, `eos`, ...) that the tokenizer has, else that the configuration has."""
    for holder in (tokenizer, config):
        for name in names:
            value = getattr(holder, f"{name}_token_id", None)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and 0 <= value < size:
                return value
    return None
