"""Heads outside transformers' attention interface, gated at the module that reads them: the output projection.

Where a family computes attention in modules of its own, there is no call to intercept. Its heads are the input of the
projection that mixes them. The site has the name of that projection, as neurons have the name of the linear that reads
them, and its gate multiplies that input. Where the projection is a weight of the attention module itself, the site has
the name of that module. `compressor.units.probe` finds both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from compressor.errors import ErrorCode, SiteRefusedError
from compressor.units.hook import OutputHook, family, unwrap
from compressor.units.prunable import Site
from graph_passes import SitePlan

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_attend = F.multi_head_attention_forward
_SIGNATURE = inspect.signature(_attend)
_models: list[nn.Module] = []
"""The models of the contexts that are entered."""
_projecting: list[Tensor] = []
"""The weights of output projections of calls that are running."""


def is_projection(module: nn.Module) -> bool:
    """Whether a module has a weight of its own and no parts: a linear, a convolution, or a subclass of either.

    Modules that call the attention interface are never of this kind: they have projections as parts, or no weight.
    """
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1 and not any(module.children())


def channels_last(module: nn.Module, x: Tensor) -> Tensor:
    """The input of a projection with the axis that it sums over as the last one; the inverse is `channels_back`."""
    return x.movedim(1, -1) if isinstance(module, _CONVOLUTIONS) else x


def channels_back(module: nn.Module, x: Tensor) -> Tensor:
    """The inverse of `channels_last`."""
    return x.movedim(-1, 1) if isinstance(module, _CONVOLUTIONS) else x


@contextmanager
def hooked_projections(model: nn.Module, sites: Iterable[Site | SitePlan], on_output: OutputHook) -> Iterator[None]:
    """Pass the heads that projections read through `on_output`; sites of the attention interface are left out.

    Args:
        model: a transformers model, bare or wrapped for training.
        sites: sites of the model, or of its plan.
        on_output: called with a site's name and its heads `[batch, position, head, head_dim]`; returns the heads to
            continue with. Rows may be split into windows, or tokens flattened row by row: the first axis is a multiple
            of the rows of the batch. Sites of a plan do not record where rows are; their heads may be
            `[position, row, head, head_dim]`.
    """
    modules = dict(unwrap(model).named_modules())
    contracting: dict[str, Site | SitePlan] = {}
    with ExitStack() as undo:
        undo.enter_context(called_projections(unwrap(model)))
        for site in sites:
            module = modules.get(site.name)
            if module is not None and is_projection(module):
                hook = partial(_change_input, site, on_output)
                undo.enter_context(module.register_forward_pre_hook(hook))
            elif module is not None and contracts_heads(module, site.heads, site.head_dim):
                contracting[site.name] = site
        if contracting:
            by_name = {name: modules[name] for name in contracting}
            undo.enter_context(
                HeadContractions(by_name, lambda name, heads: _changed_heads(contracting[name], on_output, heads))
            )
        yield


def _change_input(
    site: Site | SitePlan, on_output: OutputHook, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The arguments of a projection with its first one changed."""
    changed = _changed_heads(site, on_output, channels_last(module, args[0]))
    return (channels_back(module, changed), *args[1:])


def _changed_heads(site: Site | SitePlan, on_output: OutputHook, x: Tensor) -> Tensor:
    """Heads `[..., head * head_dim]`, changed."""
    batch_axis = getattr(site, "batch_axis", 0)
    x = x.transpose(0, batch_axis) if batch_axis else x
    separate = x.unflatten(-1, (site.heads, -1))
    if separate.dim() != 4:
        rows = x.shape[0]  # an export records it as an axis, and len() as a constant
        separate = separate.reshape(rows, -1, *separate.shape[-2:])
    changed = on_output(site.name, separate).reshape(x.shape)
    return changed.transpose(0, batch_axis) if batch_axis else changed


def require_interface(model: nn.Module, sites: Iterable[Site | SitePlan], purpose: str) -> None:
    """Check that attention maps can be read and masked at every site.

    Args:
        model: the model.
        sites: the sites.
        purpose: what needs the maps, as the subject of the error message.

    Raises:
        SiteRefusedError: a site is outside transformers' attention interface.
    """
    bare = unwrap(model)
    modules = dict(bare.named_modules())
    for site in sites:
        module = modules.get(site.name)
        if module is not None and (is_projection(module) or contracts_heads(module, site.heads, site.head_dim)):
            raise SiteRefusedError(
                f"{family(bare)}: {purpose} need attention maps, and those of {site.name} are computed outside"
                " transformers' attention interface; prune heads instead",
                code=ErrorCode.SITE_REFUSED,
                family=family(bare),
                site=site.name,
            )


class HeadContractions(TorchFunctionMode):
    """While entered, passes the heads that weights are contracted with through a function.

    A contraction `[..., head, head_dim]`, `[..., head, head_dim]` -> `[...]` of an activation and a parameter sums over
    the heads and their width, as an output projection does.

    Args:
        modules: name -> the module whose own parameters count.
        change: called with the name and the heads `[..., head * head_dim]`; returns the heads to continue with.
    """

    def __init__(self, modules: Mapping[str, nn.Module], change: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self._modules, self._change = modules, change

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
            args = (args[0], *self._changed(args[0], list(args[1:])))
        return func(*args, **(kwargs or {}))

    def _changed(self, equation: str, factors: list[Tensor]) -> list[Tensor]:
        """The factors, the heads among them changed."""
        for position, weight in enumerate(factors):
            holders = (
                name
                for name, module in self._modules.items()
                if any(parameter is weight for parameter in module.parameters(recurse=False))
            )
            name = next(holders, None)
            heads = factors[1 - position]
            if name is not None and _sums_heads(equation, 1 - position) and _mixes(weight, *heads.shape[-2:]):
                factors[1 - position] = self._change(name, heads.flatten(-2)).reshape(heads.shape)
                break
        return factors


def contracting_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with parts that have a weight of three axes of their own, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(module.children()) and any(weight.dim() > 2 for weight in module.parameters(recurse=False))
    }


def contracts_heads(module: nn.Module, heads: int, head_dim: int) -> bool:
    """Whether a module has a weight of its own that can mix heads."""
    return any(_mixes(weight, heads, head_dim) for weight in module.parameters(recurse=False))


def _mixes(weight: Tensor, heads: int, head_dim: int) -> bool:
    """Whether a weight is `[outputs, head, head_dim]`; weights of single heads have heads first."""
    return weight.dim() == 3 and weight.shape[0] != heads and weight.shape[1:] == (heads, head_dim)


def _sums_heads(equation: str, position: int) -> bool:
    """Whether the last two axes of a factor, and no others, are summed over, in the order of the other factor."""
    factors, _, output = equation.replace(" ", "").partition("->")
    terms = factors.split(",")
    if len(terms) != 2 or not output or "." in equation:
        return False
    heads, weight = terms[position], terms[1 - position]
    summed = "".join(label for label in heads if label not in output)
    return len(summed) == 2 and heads.endswith(summed) and summed in weight


@contextmanager
def called_projections(model: nn.Module) -> Iterator[None]:
    """While entered, PyTorch's attention function calls the output projections of a model as modules.

    Their inputs are `[batch, position, head * head_dim]`, and hooks on them run. Modules of PyTorch do not take their
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
