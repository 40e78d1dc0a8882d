"""A smaller PyTorch model of the same family: what a plan drops is gone from every tensor."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor

from compressor.errors import InputError
from compressor.models.relative_attention import RelativeAttention
from compressor.models.segments import SegmentLayer, SegmentPreTrainedModel
from compressor.units import Site, check_plan
from graph_passes import Plan, SitePlan

Model = TypeVar("Model", bound=SegmentPreTrainedModel)


def pruned(model: Model, plan: Plan) -> Model:
    """A model that computes what `model` gated by `plan` computes, without the dropped heads.

    A head takes its query, key, value, position and output projections, its two biases and its persistent vectors with
    it; a layer without heads is its output bias on the residual. Scales are folded into the output projections.

    Args:
        model: left as it is; the result shares no tensor with it.
        plan: one entry for each of its attention sites.

    Raises:
        InputError: the plan is another model's, or masks blocks, which no tensor of a model says.
    """
    if plan.masks:
        raise InputError(
            f"plan: masks blocks of {', '.join(sorted(plan.masks))}; weights alone cannot; prune its heads alone"
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
        for key, tensor in _sliced(sites[site.name], site).items():
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
    return smaller.train(model.training)


def _sliced(attention: RelativeAttention, site: SitePlan) -> dict[str, Tensor]:
    """The tensors of one attention with the kept heads alone."""
    kept = torch.tensor(site.kept, dtype=torch.long, device=attention.o_proj.weight.device)
    found = {}
    for name, tensor in attention.state_dict().items():
        if name == "o_proj.bias":
            found[name] = tensor.clone()
        elif name == "o_proj.weight":
            scale = torch.tensor(site.scale, dtype=tensor.dtype, device=tensor.device)
            found[name] = (tensor.unflatten(1, (site.heads, -1))[:, kept] * scale[:, None]).flatten(1)
        elif name.endswith("proj.weight"):
            found[name] = tensor.unflatten(0, (site.heads, -1))[kept].flatten(0, 1)
        else:
            found[name] = tensor[kept]
    return found
