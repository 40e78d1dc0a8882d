"""The layers after the pooling of a sentence encoder or reranker: read from folders of modules, and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.configuration import damaged, invalid, read_object, unsupported
from compressor.model_folder.weight_checks import PICKLED_WEIGHTS, SAFE_WEIGHTS, check_finite, check_weight_files
from compressor.models.pooled_encoder import ACTIVATIONS, DenseLayer, NormLayer

_WEIGHT, _BIAS, _RESIDUAL = "linear.weight", "linear.bias", "residual.weight"
_NORM_WEIGHT, _NORM_BIAS = "norm.weight", "norm.bias"
EMBEDDING, SCORES = "sentence_embedding", "scores"
"""The library's names of what modules after the pooling read and write."""


def load_dense_layer(folder: Path, width: int, *, allow_pickle: bool, writes: str = EMBEDDING) -> DenseLayer:
    """The layer of a module.

    Args:
        folder: the folder of the module.
        width: the width of the embeddings that the layer reads.
        allow_pickle: whether pickled weights may be read.
        writes: the library's name of what the layer writes.

    Raises:
        InputError: a file is missing or damaged, the weights are pickled without permission or of another width, or the
            activation is not supported.
    """
    file = folder / "config.json"
    config = read_object(file, required=True)
    activation = _activation(file, config, writes)
    tensors = _tensors(folder, allow_pickle)
    weight, bias, residual = tensors.get(_WEIGHT), tensors.get(_BIAS), tensors.get(_RESIDUAL)
    known = sum(tensor is not None for tensor in (weight, bias, residual))
    if weight is None or weight.dim() != 2 or weight.shape[1] != width or len(tensors) != known:
        raise _mismatch(folder, tensors, f"{_WEIGHT} [width, {width}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _mismatch(folder, tensors, f"{_BIAS} [{len(weight)}]")
    is_residual = bool(config.get("use_residual", False))
    if (residual is not None) != (is_residual and len(weight) != width) or (
        residual is not None and residual.shape != weight.shape
    ):
        raise _mismatch(folder, tensors, f"{_RESIDUAL} {list(weight.shape)} where widths differ, and none elsewhere,")
    weight, bias, residual = (
        None if tensor is None else tensor.detach().float() for tensor in (weight, bias, residual)
    )
    assert weight is not None
    layer = DenseLayer(weight, bias, activation, is_residual=is_residual, residual=residual)
    check_finite(folder, layer)
    return layer


def load_norm_layer(folder: Path, width: int, *, allow_pickle: bool) -> NormLayer:
    """The layer of a module that normalises embeddings; see `load_dense_layer`."""
    tensors = _tensors(folder, allow_pickle)
    weight, bias = tensors.get(_NORM_WEIGHT), tensors.get(_NORM_BIAS)
    if weight is None or bias is None or weight.shape != (width,) or bias.shape != (width,):
        raise _mismatch(folder, tensors, f"{_NORM_WEIGHT} and {_NORM_BIAS} [{width}]")
    layer = NormLayer(weight.detach().float(), bias.detach().float())
    check_finite(folder, layer)
    return layer


def save_layers(layers: Iterable[DenseLayer | NormLayer], folders: Iterable[Path]) -> None:
    """Write the weights of each layer into the folder of its module, beside a copy of its `config.json`."""
    for layer, folder in zip(layers, folders, strict=True):
        tensors = (
            {_NORM_WEIGHT: layer.weight, _NORM_BIAS: layer.bias}
            if isinstance(layer, NormLayer)
            else {_WEIGHT: layer.weight, _BIAS: layer.bias, _RESIDUAL: layer.residual}
        )
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None},
            folder / SAFE_WEIGHTS,
        )


def _activation(file: Path, config: Mapping[str, object], writes: str) -> str:
    """The name of the activation, the last part of the path of a class of PyTorch."""
    for key, name in (("module_input_name", EMBEDDING), ("module_output_name", writes)):
        value = config.get(key) or EMBEDDING
        if value != name:
            text = f"the layer does not map embeddings to {writes} ({key} is {value!r}); use a model whose layers do"
            raise unsupported(file, key, value, text)
    path = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(path, str):
        raise invalid(file, "activation_function", path, "is not the name of a class")
    package, _, name = path.rpartition(".")
    if name not in ACTIVATIONS or not f"{package}.".startswith("torch.nn."):
        supported = ", ".join(ACTIVATIONS)
        text = f"the activation {path} (activation_function) is not supported; use one of torch.nn: {supported}"
        raise unsupported(file, "activation_function", path, text)
    return name


def _tensors(folder: Path, allow_pickle: bool) -> dict[str, Tensor]:
    """The tensors of a module by name."""
    pickled = check_weight_files(folder, {}, allow_pickle).pickled
    file = folder / (PICKLED_WEIGHTS if pickled else SAFE_WEIGHTS)
    if not file.is_file():
        raise _mismatch(folder, {}, f"one file, {file.name},")
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file)
    except Exception as error:  # a damaged pickle raises any error
        raise damaged(file, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise damaged(file, ValueError("no tensors by name"))
    return tensors


def _mismatch(folder: Path, tensors: Mapping[str, Tensor], expected: str) -> InputError:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    return InputError(
        f"{folder}: the weights are {shapes or 'missing'}, where {expected} is needed; save the model again with"
        " sentence-transformers (SentenceTransformer.save_pretrained)",
        code=ErrorCode.FILE_MISMATCH,
        path=folder,
    )
