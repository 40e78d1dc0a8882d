"""How much the loss of one example depends on one head's gate (Michel et al. 2019, equation 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.units import Site, hooked

_IGNORED = -100
"""Label of a position that has no loss."""


def sensitivity(
    model: PreTrainedModel,
    sites: Sequence[Site],
    mask: Tensor,
    batches: Iterable[Mapping[str, Tensor]],
) -> Tensor:
    """I_h `[heads]`: the mean over examples of |dL(x)/dgate_h|, the absolute value taken for each example.

    By the chain rule dL/dgate_h = Att_h(x) . dL/dAtt_h(x), summed over the positions of the example (and over the
    calls of a site that one forward calls several times). One gate an example and head makes the sum autograd's work.

    Args:
        model: not changed; evaluated without dropout.
        sites: its sites.
        mask: `[heads]`, bool: the heads that are still there. The others are at zero in the forward.
        batches: collated batches with the model's labels (`Task.loss_inputs`); where none is `labels`, one a row.

    Returns:
        float64, zero for the heads that are gone.
    """
    total = torch.zeros(mask.shape, dtype=torch.float64)
    seen = 0
    was_training = model.training
    model.eval()
    gates: dict[str, Tensor] = {}
    shifted = not model.config.is_encoder_decoder

    def apply(name: str, out: Tensor) -> Tensor:
        return out * gates[name][:, None, :, None].to(out.dtype)

    try:
        with hooked(model, apply):
            for batch in batches:
                there = {name: tensor.to(model.device) for name, tensor in batch.items()}
                rows = len(next(iter(there.values())))
                gate = mask.to(model.device, torch.float32).repeat(rows, 1).requires_grad_()
                parts = torch.split(gate, [site.heads for site in sites], dim=1)
                gates.update({site.name: part for site, part in zip(sites, parts, strict=True)})
                loss = model(**there).loss
                (gradient,) = torch.autograd.grad(loss, gate)
                own = _examples_loss(there["labels"], shifted) if "labels" in there else rows
                total += (gradient.abs() * own).double().sum(0).cpu()
                seen += rows
    finally:
        model.train(was_training)
    return torch.where(mask, total / max(seen, 1), 0.0)


def _examples_loss(labels: Tensor, shifted: bool) -> Tensor:
    """Factor `[rows, 1]` from d(batch loss) to d(example's own loss).

    The batch's loss is the mean over all its labels, an example's own loss the mean over its labels. One label a row
    makes this the number of rows; with a label a token rows differ. A decoder alone shifts its labels by one, so that
    the first has no loss; a decoder beside an encoder shifts its inputs.
    """
    if labels.dim() < 2 or labels.is_floating_point():
        return labels.new_full((len(labels), 1), len(labels), dtype=torch.float32)
    counted = (labels[:, int(shifted) :] != _IGNORED).sum(1, keepdim=True).float()
    return torch.where(counted > 0, counted.sum() / counted.clamp(min=1.0), 0.0)
