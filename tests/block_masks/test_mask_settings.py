"""The share of each kind of attention, and the positions that masks cover."""

from __future__ import annotations

from pathlib import Path

from compressor.block_masks.mask_selector import mask_length, shares_by_kind
from compressor.units import Site
from tests import language
from tests.block_masks.training import masked_recipe
from tests.selection import tiny

SITES = [Site("a", "causal", 2, 2, 4), Site("b", "bidirectional", 2, 2, 4), Site("c", "causal", 2, 2, 4)]


def test_a_share_by_kind_overrides_the_common_one() -> None:
    recipe = masked_recipe(drop_blocks=0.5, drop_blocks_by_kind={"causal": 0.9})
    assert shares_by_kind(recipe, SITES) == {"causal": 0.9, "bidirectional": 0.5}
    assert shares_by_kind(masked_recipe(drop_blocks=None, drop_blocks_by_kind={"causal": 0.9}), SITES) == {
        "causal": 0.9,
        "bidirectional": 0.0,
    }


def test_masks_cover_the_longest_possible_row() -> None:
    model = tiny.classifier()
    assert mask_length(model, tiny.data(), masked_recipe(max_length=9)) == 9
    assert mask_length(model, tiny.data(), masked_recipe(max_length=99)) == 16  # positions of the model


def test_masks_of_a_text_cover_its_longest_segment(tmp_path: Path) -> None:
    untrained = language.folder(**language.UNDROPPED)
    assert mask_length(untrained.model, language.data(tmp_path, untrained), masked_recipe()) == 6
