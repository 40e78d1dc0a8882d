"""A form of SigLIP 2's position embeddings whose exported graph runs with any number of images and of patches.

transformers resizes the table of positions image by image, in a loop that torch.export unrolls for the example's batch.
Bilinear resizing with antialiasing is a weighted mean of the table for each patch, which is one product for all images.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor


def resized_at_once(resize: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The form of SigLIP 2's `resize_positional_embeddings`; functions of that name with other inputs stay."""
    return resize_positions if "spatial_shapes" in inspect.signature(resize).parameters else resize


def resize_positions(positional_embeddings: Tensor, spatial_shapes: Tensor, max_length: int) -> Tensor:
    """Position embeddings of the patches of each image.

    Args:
        positional_embeddings: the table, `[row, column, width]`.
        spatial_shapes: rows and columns of the patches of each image, `[image, 2]`.
        max_length: patches per image; those beyond `rows * columns` are padding and get the embedding of the first.

    Returns:
        `[image, patch, width]`, as `torch.nn.functional.interpolate` (`bilinear`, `antialias=True`) resizes the table;
        for images that are one patch wide, as it resizes the rows alone: PyTorch 2.13 gives these equal rows.
    """
    rows, columns, width = positional_embeddings.shape
    heights, widths = spatial_shapes[:, :1], spatial_shapes[:, 1:]
    patches = torch.arange(max_length, device=spatial_shapes.device)[None]
    patches = torch.where(patches < heights * widths, patches, 0)
    by_row = _weights(torch.div(patches, widths, rounding_mode="floor"), heights, rows)
    by_column = _weights(torch.remainder(patches, widths), widths, columns)
    weights = (by_row[..., :, None] * by_column[..., None, :]).flatten(-2)
    table = positional_embeddings.reshape(rows * columns, width)
    return (weights @ table.to(weights.dtype)).to(positional_embeddings.dtype)


def _weights(targets: Tensor, sizes: Tensor, count: int) -> Tensor:
    """Weights of the positions of an axis in the mean for each patch, `[image, patch, position]`.

    They fall linearly with the distance from the patch, over one position, or over a patch's width where the axis
    shrinks, and sum to one.

    Args:
        targets: positions after resizing, `[image, patch]`.
        sizes: numbers of positions after resizing, `[image, 1]`.
        count: number of positions before.
    """
    scale = count / sizes.to(torch.float32)
    centers = (targets.to(torch.float32) + 0.5) * scale
    positions = torch.arange(count, device=targets.device, dtype=torch.float32) + 0.5
    distances = (positions - centers[..., None]).abs() / scale.clamp(min=1)[..., None]
    weights = (1 - distances).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)
