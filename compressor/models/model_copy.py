"""A copy of a model, on which forwards leave no trace in the model."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

from compressor.units.find import restored_modes, share_unread_sites


def copy_of(model: PreTrainedModel, *, with_weights: bool = False) -> PreTrainedModel:
    """A copy of a model in evaluation mode, which shares nothing that a forward can change.

    Args:
        model: the model.
        with_weights: whether its parameters are copied too; otherwise they are shared.
    """
    parameters = {} if with_weights else {id(parameter): parameter for parameter in model.parameters()}
    with restored_modes(model):
        model.train()  # LeViT caches in evaluation mode what cannot be copied
        duplicate = copy.deepcopy(model, parameters)
    share_unread_sites(model, duplicate)
    return duplicate.eval()
