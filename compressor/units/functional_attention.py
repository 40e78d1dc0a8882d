"""Output projections that PyTorch's own attention function applies, `torch.nn.functional.multi_head_attention_forward`.

`nn.MultiheadAttention` and families such as WavLM give that function the weight of a linear, which is never called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_attend = F.multi_head_attention_forward
_SIGNATURE = inspect.signature(_attend)
_models: list[nn.Module] = []
"""The models of the contexts that are entered."""
_projecting: list[Tensor] = []
"""The weights of output projections of calls that are running."""


@contextmanager
def called_projections(model: nn.Module) -> Iterator[None]:
    """While entered, PyTorch's attention function calls the output projections of a model as modules.

    Their inputs are `[row, position, head * head_dim]`, and hooks on them run. Modules of PyTorch do not take their
    fused path, which has no projection of its own. Contexts may be nested. Replicas of `nn.DataParallel` are other
    models, and a forward that gradient checkpointing repeats has to be repeated inside the context.

    Args:
        model: the model; other models are not affected, except for the fused path.
    """
    is_fused = torch.backends.mha.get_fastpath_enabled()
    _models.append(model)
    F.multi_head_attention_forward = _attend_by_modules
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        _models.remove(model)
        torch.backends.mha.set_fastpath_enabled(is_fused)
        if not _models:
            F.multi_head_attention_forward = _attend


def _attend_by_modules(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's function, which finds its output projection under the name `linear`."""
    arguments = _SIGNATURE.bind(*args, **kwargs).arguments
    query, output_weight = arguments["query"], arguments["out_proj_weight"]
    projection = _owner(output_weight, arguments["out_proj_bias"])
    # Where torch records calls, the function passes itself to the recorder, which calls it again.
    if projection is None or any(weight is output_weight for weight in _projecting):
        return _attend(*args, **kwargs)
    sizes, linear = (query.shape[0], query.shape[1] if query.dim() == 3 else 1), F.linear

    def project(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is not output_weight:
            return linear(input, weight, bias)
        F.linear = linear  # the module calls it
        by_row = projection(input.unflatten(0, sizes).transpose(0, 1))
        return by_row.transpose(0, 1).flatten(0, 1)

    F.linear = project
    _projecting.append(output_weight)
    try:
        return _attend(*args, **kwargs)
    finally:
        _projecting.pop()
        F.linear = linear


def _owner(weight: Tensor, bias: Tensor | None) -> nn.Linear | None:
    """The linear with these parameters. A parametrized weight is no parameter, and is not computed here."""
    for module in (module for model in dict.fromkeys(_models) for module in model.modules()):
        if isinstance(module, nn.Linear):
            parameters = dict(module.named_parameters(recurse=False))
            if parameters.get("weight") is weight and parameters.get("bias") is bias:
                return module
    return None
