"""Find the attention sites of a model by one forward.

A site is a module that calls transformers' attention interface, or a projection that reads heads which were computed
outside of it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors, patch_attributes

from compressor.errors import CompressorError, ErrorCode, InputError, SiteRefusedError
from compressor.units.dependencies import DependencyTracker, hidden_from_modes, kept_outputs, tracked_modules
from compressor.units.hook import Attention, Call, configs, family, intercepted, unwrap
from compressor.units.layers import is_linear, removed_afterwards
from compressor.units.projections import called_projections, is_projection, observed_projections
from compressor.units.prunable import KnowsGroups, Site, nothing_to_remove
from graph_passes import Kind

logger = logging.getLogger(__name__)
SUPPORTED = (
    "BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT, GPT-2, Llama, Qwen3, T5, BART, Marian, ViT, CLIP, Whisper, "
    "All-attention, Transformer-XL and every other family that calls transformers' attention interface"
)
"""The supported families, for error messages."""
_unread = WeakKeyDictionary[nn.Module, frozenset[str]]()
"""Model -> the sites on which no output of a graph depends."""
ForwardArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one forward of a module."""
_CROSS_INPUTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Arguments by which transformers' attention modules receive a second sequence to attend to."""


@dataclass(frozen=True)
class Units:
    """The units that one forward of a model shows.

    Attributes:
        sites: the attention sites that an output of the exported graph depends on.
        read: module paths of the linears that such an output depends on.
    """

    sites: list[Site]
    read: frozenset[str]


def find_sites(model: nn.Module, inputs: Mapping[str, Tensor], *, attention: Attention | None = None) -> list[Site]:
    """The attention sites of a model, in the order in which a forward first calls them.

    A module that one forward calls several times (layers that share weights) is one site. Heads outside transformers'
    attention interface are listed where the derivatives of a forward prove them; see `units.projections`. Heads
    are left out where no output depends on them that an exported graph keeps; see `compressor.units.dependencies`.

    Args:
        model: a transformers model; runs once in evaluation mode, and is restored afterwards. If its forward fails with
            gradients, it runs again without, and only calls of the interface are found; if it fails while tensors are
            followed, it runs again without, and outputs count as dependent on everything.
        inputs: keyword arguments of its forward, at least two positions long so that causality can be detected.
        attention: run every attention as `eager` or `sdpa`; None: as configured.

    Raises:
        SiteRefusedError: no heads were found, or an attention cannot be run in this form.
        InputError: the model does not run on the inputs, or is no transformers model.
        UsageError: `attention` is neither `eager` nor `sdpa`.
    """
    sites = find_units(model, inputs, attention=attention).sites
    if not sites:
        raise no_heads_error(model)
    return sites


def find_units(model: nn.Module, inputs: Mapping[str, Tensor], *, attention: Attention | None = None) -> Units:
    """The attention sites of a model, as `find_sites` lists them but possibly none, and the linears that outputs read.

    Forwards are tried until one succeeds; each observes less than the one before it.

    Raises:
        SiteRefusedError: an attention returns something else than heads.
        InputError: the model does not run on the inputs.
    """
    bare = unwrap(model)
    if isinstance(bare, KnowsGroups):
        return Units(list(bare.sites), frozenset(bare.feed_forwards))
    for observe, follow in ((True, True), (True, False), (False, True), (False, False)):
        try:
            units = _units_of_forward(bare, inputs, attention, observe=observe, follow=follow)
            break
        except InputError as error:  # e.g. a tensor with gradients that is converted to NumPy
            if not observe and not follow:
                raise
            logger.debug("%s: no forward (gradients: %s, followed: %s): %s", family(bare), observe, follow, error)
    logger.debug("%s: %d sites with %d heads", family(bare), len(units.sites), sum(site.heads for site in units.sites))
    return units


def no_heads_error(model: nn.Module) -> CompressorError:
    """The error for a model in which no heads were found."""
    bare = unwrap(model)
    if isinstance(bare, KnowsGroups):
        return nothing_to_remove(bare)
    name = family(bare)
    return SiteRefusedError(
        f"{name}: no attention heads were recognized: no module calls transformers' attention interface, and no"
        " projection reads heads of a softmax; remove neurons by a budget instead, e.g. --macs 70%, or use a supported"
        f" family: {SUPPORTED}",
        code=ErrorCode.SITE_REFUSED,
        family=name,
    )


def _units_of_forward(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], attention: Attention | None, *, observe: bool, follow: bool
) -> Units:
    """The sites that one forward calls and an output depends on, and the linears that one depends on.

    Projections that read heads are found with gradients (`observe`). If outputs are not followed, every unit counts.
    """
    sites: dict[str, Site] = {}
    projections = [name for name, part in model.named_modules() if is_linear(part) or is_projection(part)]
    arguments: dict[nn.Module, ForwardArguments] = {}  # of the latest forward
    with ExitStack() as contexts:
        tracker = DependencyTracker()

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments[module] = args, kwargs

        def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
            output, weights = call.run()
            if call.site not in sites:
                sites[call.site] = _site(call, output, arguments.get(call.module, ((), {})))
            tracker.propagate((call.query, call.key, call.value, call.mask, call.options), (output, weights))
            tracker.mark(call.site, output)
            return output.detach(), weights  # what follows reads heads of this site, not of a projection

        def on_heads(site: Site) -> None:
            sites[site.name] = site

        hooks = (module.register_forward_pre_hook(record, with_kwargs=True) for module in model.modules())
        contexts.enter_context(removed_afterwards(hooks))
        contexts.enter_context(evaluation_mode(model))
        contexts.enter_context(observed_projections(model, on_heads, tracker.mark) if observe else torch.no_grad())
        contexts.enter_context(intercepted(model, on_call, attention))
        if follow:
            contexts.enter_context(tracked_modules(model, projections, tracker))
            contexts.enter_context(tracker)
        outputs = get_leaf_tensors(_run(model, inputs))
    if not follow:
        logger.debug("%s: what its outputs depend on cannot be followed; every unit counts", family(model))
        _unread.pop(model, None)
        return Units(list(sites.values()), frozenset(projections))
    read = tracker.names_of(outputs[name] for name in kept_outputs(model, outputs))
    _unread[model] = frozenset(sites.keys() - read)
    return Units([site for site in sites.values() if site.name in read], frozenset(read))


def unread_sites(model: nn.Module) -> frozenset[str]:
    """The sites on which no output of a graph depends, by the last `find_sites` of a model; none before the first."""
    return _unread.get(model, frozenset())


def share_unread_sites(model: nn.Module, copied: nn.Module) -> None:
    """Record the unread sites of a model, if they were determined, for a model of the same modules."""
    if model in _unread:
        _unread[copied] = _unread[model]


def _run(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Any:
    """What a model returns; raise InputError if it fails on the inputs."""
    try:
        return model(**inputs)
    except CompressorError:
        raise
    except Exception as error:  # model code can raise any type on inputs that it was not written for
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise InputError(
            f"{family(model)}: the model does not run on {', '.join(inputs)} ({type(error).__name__}: {reason}); give"
            " inputs that it runs on (--inputs FILE.npz)",
            code=ErrorCode.UNSUPPORTED_MODEL,
            family=family(model),
            reason=reason,
        ) from error


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode without key/value cache, as in an export; afterwards it is in its former mode.

    Its output projections are called as modules; see `called_projections`.
    """
    caching = (config for config in configs(unwrap(model)) if hasattr(config, "use_cache"))
    caches = [(config, "use_cache", lambda _: False) for config in caching]
    with evaluating(model), patch_attributes(caches), called_projections(model):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards each of its modules is in its former mode."""
    with restored_modes(model):
        model.eval()
        yield


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """On exit, each module of the model is in the mode that it had: training or evaluation."""
    was_training, modes = model.training, [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        model.train()  # LeViT drops here what its forward cached, which cannot be copied
        if not was_training:
            model.eval()  # where others cache what their forward reads
        for module, training in modes:
            module.training = training


@hidden_from_modes()
def _site(call: Call, output: Tensor, arguments: ForwardArguments) -> Site:
    """The site of a call, from its output and the arguments of its module's forward.

    Raises:
        SiteRefusedError: the output is not `[batch, query, head, head_dim]`.
    """
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if output.dim() != 4 or output.shape[2] != heads or heads % kv_heads:
        text = (
            f"{call.site}: its attention returns {list(output.shape)} for {heads} query and {kv_heads} key/value"
            " heads, not [batch, query, head, head_dim]; this family cannot be gated"
        )
        raise SiteRefusedError(text, code=ErrorCode.SITE_REFUSED, site=call.site, shape=tuple(output.shape))
    groups = getattr(call.module, "num_key_value_groups", 1)
    if kv_heads == heads and groups > 1:  # the family repeats the key/value heads before it calls the interface
        kv_heads = heads // groups
    return Site(call.site, kind_of_call(call, arguments), heads, kv_heads, output.shape[3])


def kind_of_call(call: Call, arguments: ForwardArguments) -> Kind:
    """The kind of attention of a call, from the arguments of its module's forward and from its mask."""
    args, kwargs = arguments
    names = list(inspect.signature(type(call.module).forward).parameters)[1:]  # without `self`
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    # Modules of self-attention may receive the same argument in `**kwargs` and ignore it.
    if any(name in names and by_name.get(name) is not None for name in _CROSS_INPUTS):
        return "cross"
    if call.query.shape[2] == call.key.shape[2]:
        return "causal" if _is_causal(call) else "bidirectional"
    # More keys than queries in self-attention: a memory before them, or persistent vectors that every query sees.
    is_self_attention = call.mask is not None and getattr(call.module, "is_causal", False)
    return "causal" if is_self_attention and _is_causal(call) else "cross"


def _is_causal(call: Call) -> bool:
    """Whether no query attends to a later key, in any row."""
    visible = call.visible
    if visible is None:  # SDPA's own flag decides; eager attention without a mask attends to everything
        return call.is_causal and call.implementation == "sdpa"
    if visible.dim() != 4 or not call.is_causal:
        return False
    length = call.query.shape[2]
    hidden = ~visible.expand(-1, -1, length, -1)  # a mask of padding only has one row for all queries
    later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
    # The keys of the queries' own positions follow a memory of any length.
    starts = range(hidden.shape[3] - length + 1)
    return any(bool(hidden[..., start : start + length][..., later].all()) for start in starts)
