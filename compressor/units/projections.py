"""Heads outside transformers' attention interface, gated at the module that reads them: the output projection.

A family that computes attention in its own modules offers no call to intercept. Its heads still meet the model again in
one place, the input of the projection that mixes them. The site is named after that projection, as neurons are named
after the linear that reads them, and its gate multiplies that input. Where the projection is a weight of the attention
module itself, the site has the name of that module. See `compressor.units.probe` for how both are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from compressor.errors import ErrorCode, SiteRefusedError
from compressor.units.contractions import HeadContractions, contracts_heads
from compressor.units.functional_attention import called_projections
from compressor.units.hook import OutputHook, family, unwrap

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


class Heads(Protocol):
    """A site of a model or of a plan."""

    @property
    def name(self) -> str:
        """Module path."""

    @property
    def heads(self) -> int:
        """Number of query heads."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""


def is_projection(module: nn.Module) -> bool:
    """Whether a module has a weight of its own and no parts: a linear, a convolution, or a subclass of either.

    Modules that call the attention interface are never of this kind: they have projections as parts, or no weight.
    """
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1 and not any(module.children())


def channels_last(module: nn.Module, x: Tensor) -> Tensor:
    """The input of a projection with the axis that it sums over as the last one; its own inverse is `channels_back`."""
    return x.movedim(1, -1) if isinstance(module, _CONVOLUTIONS) else x


def channels_back(module: nn.Module, x: Tensor) -> Tensor:
    """The inverse of `channels_last`."""
    return x.movedim(-1, 1) if isinstance(module, _CONVOLUTIONS) else x


@contextmanager
def hooked_projections(model: nn.Module, sites: Iterable[Heads], on_output: OutputHook) -> Iterator[None]:
    """Pass the heads that projections read through `on_output`; sites of the attention interface are left out.

    Args:
        model: a transformers model, bare or wrapped for training.
        sites: sites of the model, or of its plan.
        on_output: called with a site's name and its heads `[rows, position, head, head_dim]`; returns the heads to
            continue with. Rows may be split into windows, or tokens flattened row by row: the first axis is a multiple
            of the rows of the batch. Sites of a plan do not record where rows are; their heads may be
            `[position, row, head, head_dim]`.
    """
    modules = dict(unwrap(model).named_modules())
    contracting: dict[str, Heads] = {}
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


def _change_input(site: Heads, on_output: OutputHook, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a projection with its first one changed."""
    changed = _changed_heads(site, on_output, channels_last(module, args[0]))
    return (channels_back(module, changed), *args[1:])


def _changed_heads(site: Heads, on_output: OutputHook, x: Tensor) -> Tensor:
    """Heads `[..., head * head_dim]`, changed."""
    batch_axis = getattr(site, "batch_axis", 0)
    x = x.transpose(0, batch_axis) if batch_axis else x
    separate = x.unflatten(-1, (site.heads, -1))
    if separate.dim() != 4:
        rows = x.shape[0]  # an export records it as an axis, and len() as a constant
        separate = separate.reshape(rows, -1, *separate.shape[-2:])
    changed = on_output(site.name, separate).reshape(x.shape)
    return changed.transpose(0, batch_axis) if batch_axis else changed


def is_outside_interface(module: nn.Module, site: Heads) -> bool:
    """Whether a site is hooked where its heads are read, because its attention cannot be intercepted."""
    return is_projection(module) or contracts_heads(module, site.heads, site.head_dim)


def require_interface(model: nn.Module, sites: Iterable[Heads], purpose: str) -> None:
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
        if module is not None and is_outside_interface(module, site):
            raise SiteRefusedError(
                f"{family(bare)}: {purpose} need attention maps, and those of {site.name} are computed outside"
                " transformers' attention interface; prune heads instead",
                code=ErrorCode.SITE_REFUSED,
                family=family(bare),
                site=site.name,
            )
