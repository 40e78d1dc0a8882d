"""Resizing of positions for all images at once equals transformers' loop over images."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import interpolate
from transformers.models.cosmos3_edge.modeling_cosmos3_edge import Cosmos3EdgeVisionEmbeddings
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from benchmarks.families_tiny import tiny_model
from compressor.models.export_forms import any_length
from compressor.models.image_positions import resize_positions, resized_at_once

SHAPES = torch.tensor([[4, 4], [16, 16], [7, 11], [20, 12], [1, 9], [13, 3], [24, 10]])
PATCHES = 260


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (8, 8), (5, 7)])
def test_tables_are_resized_to_the_shape_of_each_image(rows: int, columns: int) -> None:
    table = torch.randn(rows, columns, 6, generator=torch.Generator().manual_seed(0))
    at_once, loop = resize_positions(table, SHAPES, PATCHES), cast(Any, Siglip2VisionEmbeddings)
    torch.testing.assert_close(at_once, loop.resize_positional_embeddings(table, SHAPES, PATCHES))
    height, width = SHAPES[2].tolist()
    image = interpolate(table.permute(2, 0, 1)[None], (height, width), mode="bilinear", antialias=True)
    torch.testing.assert_close(at_once[2, : height * width], image[0].flatten(1).T)


def test_images_of_one_column_are_resized_by_rows() -> None:
    table = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(0))
    at_once = resize_positions(table, torch.tensor([[5, 1], [1, 5]]), 5)
    expected = resize_positions(table.transpose(0, 1), torch.tensor([[1, 5], [5, 1]]), 5)
    torch.testing.assert_close(at_once, expected)
    assert (at_once[0, 0] - at_once[0, 1]).abs().max() > 1e-2


def test_the_function_of_the_model_is_replaced_and_restored() -> None:
    name, model = "resize_positional_embeddings", tiny_model("siglip2")
    original = inspect.getattr_static(Siglip2VisionEmbeddings, name)
    with any_length(model):
        assert getattr(Siglip2VisionEmbeddings, name) is resize_positions
        assert isinstance(inspect.getattr_static(Siglip2VisionEmbeddings, name), staticmethod)
    assert inspect.getattr_static(Siglip2VisionEmbeddings, name) is original


def test_a_function_of_other_inputs_stays() -> None:
    function = Cosmos3EdgeVisionEmbeddings.resize_positional_embeddings
    assert resized_at_once(function) is function
