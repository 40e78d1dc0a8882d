"""Check that a model gives finite outputs, which everything that is made from it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors

from compressor.errors import ErrorCode, InputError
from compressor.targets.relative_error import is_defined
from compressor.units.hook import family


def require_defined(model: PreTrainedModel, inputs: Mapping[str, Tensor], outputs: Mapping[str, np.ndarray]) -> None:
    """Check the outputs of a model, and name the module where they overflow.

    Args:
        model: the model, as it computed the outputs.
        inputs: what they were computed from.
        outputs: the outputs by name.

    Raises:
        InputError: an output has NaN, or infinities alone.
    """
    feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
    undefined = next((name for name, array in outputs.items() if not is_defined(array, feeds)), None)
    if undefined is None:
        return
    module = first_not_finite(model, inputs)
    where = "" if module is None else f", and before it that of its module {module}"
    raise InputError(
        f"{family(model)}: the output {undefined} of the model is NaN or infinite{where}; check its weights, or use a"
        " checkpoint from before the training diverged",
        code=ErrorCode.NOT_FINITE,
        output=undefined,
        module=module,
    )


def first_not_finite(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> str | None:
    """Path of the module that is the first to return a value that is NaN or infinite; None: no module does.

    Args:
        model: the model.
        inputs: arguments of its forward.
    """
    paths: list[str] = []

    def observe(path: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        tensors = get_leaf_tensors(result).values()
        if not paths and any(not torch.isfinite(tensor).all() for tensor in tensors if tensor.is_floating_point()):
            paths.append(path)

    with ExitStack() as undo:
        for path, module in model.named_modules():
            if path:
                undo.enter_context(module.register_forward_hook(partial(observe, path)))
        model(**inputs)
    return paths[0] if paths else None
