"""Several processes watch maps together: what each finds, and with fewer rows than processes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from compressor.block_masks import AttentionMaps, collect_attention_maps
from compressor.model_folder import example_inputs
from compressor.units import find_sites, keep_all
from tests import language, learning


def found(at: Path) -> dict[str, AttentionMaps]:
    """Maps of nine rows, of a single one, and of a single segment of a text."""
    model, data = learning.model(), learning.data()
    sites = learning.sites(model)
    maps = {}
    for name, count in (("nine", 9), ("one", 1)):
        rows = replace(data, train=learning.rows(count, 0))
        maps[name] = collect_attention_maps(model, sites, rows, keep_all(sites), length=9, batch_size=2)
    held = language.folder(**language.UNDROPPED)
    with PartialState(cpu=True).main_process_first():
        text = language.data(at, held, lines=4)
    spots = find_sites(held.model, example_inputs(held, 2, 6))
    maps["segment"] = collect_attention_maps(held.model, spots, text, keep_all(spots), length=6, batch_size=1, rows=1)
    return maps


def told(maps: dict[str, AttentionMaps]) -> dict[str, Any]:
    """Every map and its counts, as JSON."""
    return {
        name: {site: [each.maps[site].tolist(), each.counts[site].tolist()] for site in each.maps}
        for name, each in maps.items()
    }


def main(at: Path) -> None:
    """One of the processes."""
    state = PartialState(cpu=True)
    (at / f"rank{state.process_index}.json").write_text(json.dumps(told(found(at))))
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
