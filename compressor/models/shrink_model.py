"""Build a smaller PyTorch model of the same family, without the heads that a plan drops."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor

from compressor.errors import ErrorCode, InputError
from compressor.models.relative_attention import RelativeAttention
from compressor.models.segments import SegmentLayer, SegmentPreTrainedModel
from compressor.units import Site, check_plan
from graph_passes import Plan, SitePlan

Model = TypeVar("Model", bound=SegmentPreTrainedModel)


def pruned(model: Model, plan: Plan) -> Model:
    """A model without the dropped heads that computes the same function as `model` gated by `plan`.

    Dropping a head removes its query, key, value, position and output projections, its two biases and its persistent
    vectors. A layer without heads adds its output bias to the residual. Scales are folded into the output projections.

    Args:
        model: the model, which is not changed and shares no tensor with the result.
        plan: one entry for each attention site of the model.

    Raises:
        InputError: the plan belongs to another model, masks blocks of attention maps, or drops or scales neurons.
    """
    neurons = [group.name for group in plan.feed_forwards if group.gate != (1.0,) * group.units]
    if neurons:
        raise InputError(
            f"plan: it drops or scales neurons of {neurons[0]}, which only graphs are shrunk by; use a plan of heads",
            code=ErrorCode.INVALID_VALUE,
            field="plan",
            sites=tuple(neurons),
        )
    if plan.masks:
        raise InputError(
            f"plan: it masks blocks of {', '.join(sorted(plan.masks))}, which removing heads cannot express; use a plan"
            " that only drops heads",
            code=ErrorCode.INVALID_VALUE,
            field="plan",
            sites=tuple(sorted(plan.masks)),
        )
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SegmentLayer)}
    sites = {f"{name}.attention": layer.attention for name, layer in layers.items() if layer.heads}
    check_plan(plan, [Site(name, "causal", at.heads, at.heads, at.head_dim) for name, at in sites.items()])
    planned = {site.name: site for site in plan.sites}
    config = copy.deepcopy(model.config)
    config.layer_heads = [config.kept(layer) for layer in range(config.num_hidden_layers)]
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for index, name in enumerate(layers):
        site = planned.get(f"{name}.attention")
        if site is None:
            continue
        config.layer_heads[index] = [config.layer_heads[index][head] for head in site.kept]
        for key, tensor in _slice_heads(sites[site.name], site).items():
            state[f"{site.name}.{key}"] = tensor
        if not site.kept:
            bias = state[f"{site.name}.o_proj.bias"]
            state = {
                key: value
                for key, value in state.items()
                if not key.startswith((f"{name}.attention.", f"{name}.norm."))
            }
            state[f"{name}.bias"] = bias
    with torch.device("meta"):
        smaller = type(model)(config)
    smaller.load_state_dict(state, assign=True)
    smaller.tie_weights()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    return smaller.train(model.training)


def _slice_heads(attention: RelativeAttention, site: SitePlan) -> dict[str, Tensor]:
    """The tensors of one attention, reduced to the kept heads."""
    kept = torch.tensor(site.kept, dtype=torch.long, device=attention.o_proj.weight.device)
    tensors = {}
    for name, tensor in attention.state_dict().items():
        if name == "o_proj.bias":
            tensors[name] = tensor.clone()
        elif name == "o_proj.weight":
            scale = torch.tensor(site.scale, dtype=tensor.dtype, device=tensor.device)
            tensors[name] = (tensor.unflatten(1, (site.heads, -1))[:, kept] * scale[:, None]).flatten(1)
        elif name.endswith("proj.weight"):
            tensors[name] = tensor.unflatten(0, (site.heads, -1))[kept].flatten(0, 1)
        else:
            tensors[name] = tensor[kept]
    return tensors
