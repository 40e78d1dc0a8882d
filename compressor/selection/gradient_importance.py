"""Importance of heads: the sensitivity of the loss to the gate of each head (Michel et al. 2019, equation 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from compressor.tasks.forwards import IGNORED
from compressor.units import Site, hooked
from compressor.units.find import evaluating
from compressor.units.gating import spread_over_rows


def sensitivity(
    model: PreTrainedModel,
    sites: Sequence[Site],
    mask: Tensor,
    batches: Iterable[Mapping[str, Tensor]],
) -> Tensor:
    """I_h `[heads]`: the mean over examples of |dL(x)/dgate_h|, the absolute value taken per example.

    By the chain rule dL/dgate_h = Att_h(x) . dL/dAtt_h(x), summed over the positions of the example, over its rows
    where the model reads several (both texts of a pair), and over the calls of a site that one forward calls several
    times. One gate per example and head lets autograd compute the sum.

    Args:
        model: the model, which is not changed and runs without dropout.
        sites: its sites, in call order.
        mask: `[heads]`, bool: the heads that are kept; the others are zero in the forward.
        batches: collated batches with the model's labels (`Task.loss_inputs`). A batch without `labels` has one label
            per row under another name.

    Returns:
        `[heads]`, float64; zero for the heads outside `mask`.
    """
    total = torch.zeros(mask.shape, dtype=torch.float64)
    examples = 0
    gates: dict[str, Tensor] = {}
    is_shifted = _shifts_labels(model)

    def apply(name: str, out: Tensor) -> Tensor:
        return out * spread_over_rows(gates[name], len(out)).to(out.dtype)

    with evaluating(model), hooked(model, apply, sites=sites):
        for batch in batches:
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
            rows = len(inputs["labels"]) if "labels" in inputs else len(next(iter(inputs.values())))
            gate = mask.to(model.device, torch.float32).repeat(rows, 1).requires_grad_()
            parts = torch.split(gate, [site.heads for site in sites], dim=1)
            gates.update({site.name: part for site, part in zip(sites, parts, strict=True)})
            loss = model(**inputs).loss
            (gradient,) = torch.autograd.grad(loss, gate)
            factor = _loss_factor(inputs["labels"], is_shifted=is_shifted) if "labels" in inputs else rows
            total += (gradient.abs() * factor).double().sum(0).cpu()
            examples += rows
    return torch.where(mask, total / max(examples, 1), 0.0)


def _shifts_labels(model: PreTrainedModel) -> bool:
    """Whether the loss compares the output of a position with the label of the next: that of causal language models.

    transformers uses it for classes without a loss of their own too. Encoder-decoders shift their inputs instead.
    """
    causal = LOSS_MAPPING["ForCausalLM"]
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM", causal)
    return loss is causal and not model.config.is_encoder_decoder


def _loss_factor(labels: Tensor, *, is_shifted: bool) -> Tensor:
    """Factor `[examples, 1]` that converts a gradient of the batch's loss to one of each example's own loss.

    The loss of the batch is the mean over all its labels, the loss of an example the mean over its own labels. With one
    label per example the factor is the number of examples; with one label per token it differs between examples. Where
    labels are shifted by one (`is_shifted`), the first has no loss.
    """
    if labels.dim() < 2 or labels.is_floating_point():
        return labels.new_full((len(labels), 1), len(labels), dtype=torch.float32)
    counted = (labels[:, int(is_shifted) :] != IGNORED).sum(1, keepdim=True).float()
    return torch.where(counted > 0, counted.sum() / counted.clamp(min=1.0), 0.0)
