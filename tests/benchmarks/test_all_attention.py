"""Scripts that measure the heads of All-attention: their schedules, their counts and their reports."""

from __future__ import annotations

import csv
import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import all_attention, all_attention_cost
from benchmarks.all_attention import Study
from benchmarks.all_attention_cost import layer_macs
from benchmarks.all_attention_findings import describe, describe_times, findings_of
from benchmarks.all_attention_sizes import LEVELS, SIZES, pace
from benchmarks.studies.findings import write_csv
from compressor.export import export_reference
from compressor.measure import macs
from compressor.models import AllAttentionConfig, AllAttentionModel, TransformerXLConfig, TransformerXLModel
from compressor.progress import NullListener
from compressor.segment_memory import memory_names
from compressor.units import find_sites, keep_all, keep_only
from graph_passes import load, shrink
from tests import language


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "dense"), [("tiny", 0.05), ("small", 0.05), ("paper", 4_000 / 160_000)])
def test_warm_up_takes_the_share_of_the_paper_or_a_twentieth(name: str, level: str, dense: float) -> None:
    size = SIZES[name][level]
    assert [pace(steps, size.precision)["warmup"] for steps in (size.steps, size.pruning)] == [dense, 0.05]


def test_a_study_reports_tokens_and_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Interrupted cells, and those written before times were stored, have no time."""
    for name, seed in (("TRAIN", 0), ("VALID", 1)):
        path = tmp_path / f"{name}.txt.xz"
        path.write_bytes(lzma.compress(language.text(80, seed).encode()))
        monkeypatch.setattr(all_attention, name, path)
    size = replace(
        SIZES["tiny"]["word"], hidden=16, layers=1, persistent=8, segment=6, batch=3, steps=2, pruning=4, precision="no"
    )
    study = Study("word", size, tmp_path / "out")
    dense, longer, penalised, *_ = study.cells((1,))
    (work := tmp_path / "out" / "cells" / "longer-s1.partial" / "checkpoints").mkdir(parents=True)
    study.folder.run([dense, longer, penalised], study.run, NullListener())
    assert not work.exists()
    cells = study.folder.results()
    assert [cell["seconds"] is None for cell in cells] == [False, False, True]
    assert describe_times(cells).startswith("2 of 3 cells took")
    text = sum(study.data.train["length"]) - len(study.data.train) + 1
    description = describe(study, "tiny", cells)
    tokens = f"which read {2 * 3 * 6} and, from the beginning again, {4 * 3 * 6} tokens of a text of {text}"
    assert f"2 and then 4 steps, {tokens}, learning rate of gates 0.3" in description
    for file in (tmp_path / "out" / "cells").glob("*.json"):
        cell = json.loads(file.read_text())
        del cell["seconds"]
        file.write_text(json.dumps(cell))
    untimed = study.folder.results()
    assert describe_times(untimed) == "no times are known"
    write_csv(tmp_path / "study.csv", findings_of(study, untimed, description).rows)
    with (tmp_path / "study.csv").open(newline="") as lines:
        assert [row["seconds"] for row in csv.DictReader(lines)] == [""] * 3


# Computed costs


@pytest.mark.zoo
@pytest.mark.parametrize("persistent", [True, False])
def test_computed_macs_of_a_layer_equal_those_of_the_graph(persistent: bool, tmp_path: Path) -> None:
    """Five heads in two layers of four, over a segment of 6 with a memory of the same length."""
    sizes: dict[str, Any] = {
        "vocab_size": 2,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "memory_length": 6,
    }
    model: Any = (
        AllAttentionModel(AllAttentionConfig(num_persistent=5, **sizes))
        if persistent
        else TransformerXLModel(TransformerXLConfig(intermediate_size=5, **sizes))
    ).eval()
    inputs = {"inputs_embeds": torch.randn(2, 5, 24), **{name: torch.randn(2, 3, 24) for name in memory_names(2)}}
    sites = find_sites(model, inputs)
    export_reference(model, keep_all(sites), inputs, tmp_path / "reference.onnx")
    kept = {(site.name, head): 1.0 for site, heads in zip(sites, [(0, 1, 3), (0, 2)], strict=True) for head in heads}
    shrunk = shrink(load(tmp_path / "reference.onnx"), keep_only(sites, kept)).model
    assert macs(shrunk, 1, 6) == sum(layer_macs(heads, 4, 24, 5, 6, persistent=persistent) for heads in (3, 2))


def test_half_of_the_heads_is_half_of_the_cost_only_in_all_attention(capsys: pytest.CaptureFixture[str]) -> None:
    """For a Transformer-XL, 73% of multiply-accumulates and 81% of parameters remain in figure 1 of the paper."""
    all_attention_cost.main()
    (half,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| 50%"))
    assert half == "| 50% | 50.0 | 71.9 | 50.0 | 80.8 |"
