"""Collecting attention maps, alone or in one of several processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from compressor.block_masks.attention_maps import AttentionMaps, collect_attention_maps
from compressor.model_folder import example_inputs
from compressor.units import find_sites, keep_all
from tests import language
from tests.selection import tiny


def collect(folder: Path) -> dict[str, AttentionMaps]:
    """Maps of nine rows, of a single row, and of a single segment of a text, which is written into `folder`."""
    model, data = tiny.classifier(), tiny.data()
    sites = tiny.sites_of(model)
    maps = {}
    for name, count in (("nine", 9), ("one", 1)):
        rows = replace(data, train=tiny.rows(count, 0))
        maps[name] = collect_attention_maps(model, sites, rows, keep_all(sites), length=9, batch_size=2)
    untrained = language.folder(**language.UNDROPPED)
    with PartialState(cpu=True).main_process_first():
        text = language.data(folder, untrained, lines=4)
    sites = find_sites(untrained.model, example_inputs(untrained, 2, 6))
    plan = keep_all(sites)
    maps["segment"] = collect_attention_maps(untrained.model, sites, text, plan, length=6, batch_size=1, rows=1)
    return maps


def collect_together(folder: Path) -> dict[str, Any]:
    """Maps and counts of every site, by the name of the rows."""
    maps = collect(folder)
    return {
        name: {site: [site_maps.maps[site].tolist(), site_maps.counts[site].tolist()] for site in site_maps.maps}
        for name, site_maps in maps.items()
    }
