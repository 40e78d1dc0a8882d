"""Every bad input: an exit code, a code, one line that names what is wrong, and no file left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers as hf

from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, load
from compressor.units import find_sites, keep_all
from graph_passes import GraphErrorCode, Plan, save, shrink
from graph_passes import load as load_graph
from tests import folders
from tests.command import compress

Cap = pytest.CaptureFixture[str]
Words = list[str | Path]
SITE = "bert.encoder.layer.0.attention.self"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nothing is wrong: `model`, `rows.tsv`, `plan.json`, `dense.onnx`."""
    from compressor.export import export_reference

    place = tmp_path_factory.mktemp("sound")
    folders.save(folders.bert(), place / "model")
    folder = load(place / "model")
    inputs = example_inputs(folder, 2, 8)
    plan = keep_all(find_sites(folder.model, inputs)).model_copy(update={"model": folder.fingerprint})
    plan.save(place / "plan.json")
    export_reference(folder.model, plan, inputs, place / "dense.onnx")
    rows = [f"{index % 2}\tthe {'good' if index % 2 else 'bad'} film {index % 5}" for index in range(40)]
    (place / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return place


@pytest.fixture
def place(sound: Path, tmp_path: Path) -> Path:
    """A copy of the sound folder, to be spoilt."""
    return shutil.copytree(sound, tmp_path / "place")


LEARN = ["--keep", "1", "--steps", "2", "--batch-size", "4", "--max-length", "8", "--batch", "1", "--seq", "8"]


def learning(place: Path) -> Words:
    return [place / "model", "--data", place / "rows.tsv", *LEARN]


def searching(place: Path) -> Words:
    """A search that has its end from what it is allowed to lose."""
    return [place / "model", "--data", place / "rows.tsv", *LEARN[2:], "--method", "astar"]


def following(place: Path, **changed: Any) -> Words:
    """A run that follows the plan with its one site changed."""
    plan = json.loads((place / "plan.json").read_text())
    plan["sites"][0].update(changed)
    (place / "plan.json").write_text(json.dumps(plan))
    return [place / "model", "--plan", place / "plan.json"]


def missing(place: Path) -> Words:
    return [place / "nowhere"]


def empty(place: Path) -> Words:
    (place / "empty").mkdir()
    return [place / "empty"]


def no_tokenizer(place: Path) -> Words:
    for file in (place / "model").glob("tokenizer*"):
        file.unlink()
    return [place / "model"]


def pickled(place: Path) -> Words:
    (place / "model" / "model.safetensors").unlink()
    torch.save(folders.bert().state_dict(), place / "model" / "pytorch_model.bin")
    return [place / "model"]


def remote_code(place: Path) -> Words:
    config = json.loads((place / "model" / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling.Mine"}
    (place / "model" / "config.json").write_text(json.dumps(config))
    return [place / "model"]


def not_a_number(place: Path) -> Words:
    model = folders.bert()
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    model.save_pretrained(place / "model")
    return [place / "model"]


def truncated_weights(place: Path) -> Words:
    cut(place / "model" / "model.safetensors")
    return [place / "model"]


def truncated_graph(place: Path) -> Words:
    cut(place / "dense.onnx")
    return applying(place)


def truncated_data(place: Path) -> Words:
    cut(place / "dense.onnx.data")
    return applying(place)


def data_outside(place: Path) -> Words:
    graph = onnx.load(place / "dense.onnx", load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../dense.onnx.data"
    onnx.save(graph, place / "dense.onnx")
    return applying(place)


def applying(place: Path) -> Words:
    return ["apply", place / "dense.onnx", "--plan", place / "plan.json"]


def another_model(place: Path) -> Words:
    torch.manual_seed(7)
    folders.save(folders.bert(), place / "model")
    return following(place)


def trained_elsewhere(place: Path) -> Words:
    plan = json.loads((place / "plan.json").read_text())
    (place / "plan.json").write_text(json.dumps({**plan, "model": "sha256:1", "method": "dsp"}))
    return [place / "model", "--plan", place / "plan.json"]


def beside_its_weights(place: Path) -> Words:
    trained_elsewhere(place)
    (place / "run").mkdir()
    (place / "run" / "model.safetensors").touch()
    return [place / "model", "--plan", (place / "plan.json").rename(place / "run" / "plan.json")]


def shrunk_already(place: Path) -> Words:
    plan = Plan.load(place / "plan.json")
    site = plan.sites[0]
    less = plan.model_copy(update={"sites": (replace(site, kept=site.kept[1:], scale=()),)})
    save(shrink(load_graph(place / "dense.onnx"), less).model, place / "dense.onnx")
    less.save(place / "plan.json")
    return applying(place)


def strange_label(place: Path) -> Words:
    config = json.loads((place / "model" / "config.json").read_text())
    config |= {"id2label": {"0": "asyncio", "1": "email"}, "label2id": {"asyncio": 0, "email": 1}}
    (place / "model" / "config.json").write_text(json.dumps(config))
    text = (place / "rows.tsv").read_text().replace("\n0\t", "\nasyncio\t").replace("\n1\t", "\nemail\t")
    (place / "rows.tsv").write_text(text + "zebra\tthe plot\n")
    return learning(place)


def timing(place: Path, graph: str | Path) -> Words:
    return ["bench", place / "dense.onnx" if isinstance(graph, Path) else place / graph, place / "dense.onnx"]


def no_label(place: Path) -> Words:
    text = (place / "rows.tsv").read_text()
    (place / "rows.tsv").write_text(text.replace("label\ttext", "verdict\ttext"))
    return learning(place)


def one_class(place: Path) -> Words:
    text = (place / "rows.tsv").read_text()
    (place / "rows.tsv").write_text(text.replace("\n1\t", "\n0\t"))
    return learning(place)


def empty_evaluation(place: Path) -> Words:
    (place / "eval.tsv").write_text("label\ttext\n")
    return [*learning(place), "--eval-data", place / "eval.tsv"]


def off_the_hook(place: Path) -> Words:
    sizes: dict[str, Any] = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.DebertaV2Config(**sizes, intermediate_size=20, max_position_embeddings=20)
    folders.save(hf.DebertaV2ForSequenceClassification(config), place / "deberta")
    return [place / "deberta"]


def unknown_key(place: Path) -> Words:
    (place / "model" / "compress.toml").write_text("kep = 3")
    return [place / "model"]


def cut(file: Path) -> Path:
    os.truncate(file, file.stat().st_size // 2)
    return file


BAD: dict[str, tuple[Callable[[Path], Words], int, str, str]] = {
    "missing folder": (missing, 3, ErrorCode.FILE_MISSING, "nowhere"),
    "empty folder": (empty, 3, ErrorCode.FILE_MISSING, "empty"),
    "no tokenizer": (no_tokenizer, 3, ErrorCode.FILE_MISSING, "model"),
    "pickled weights": (pickled, 3, ErrorCode.UNSAFE_CODE, "--allow-pickle"),
    "remote code": (remote_code, 3, ErrorCode.UNSAFE_CODE, "--trust-remote-code"),
    "NaN weights": (not_a_number, 3, ErrorCode.NOT_FINITE, "model"),
    "truncated safetensors": (truncated_weights, 3, ErrorCode.FILE_UNREADABLE, "model.safetensors"),
    "truncated ONNX": (truncated_graph, 3, ErrorCode.FILE_UNREADABLE, "dense.onnx"),
    "truncated external data": (truncated_data, 3, ErrorCode.FILE_UNREADABLE, "dense.onnx.data"),
    "external data outside": (data_outside, 3, GraphErrorCode.UNSAFE_PATH, "dense.onnx.data"),
    "plan with an unknown site": (
        lambda place: following(place, name="bert.nowhere"),
        3,
        ErrorCode.PLAN_MISMATCH,
        "bert.nowhere",
    ),
    "head out of range": (lambda place: following(place, kept=[0, 2]), 3, GraphErrorCode.INVALID_PLAN, "head 2"),
    "head twice": (lambda place: following(place, kept=[1, 1]), 3, GraphErrorCode.INVALID_PLAN, "[1, 1]"),
    "plan with other heads": (
        lambda place: following(place, heads=4, kv_heads=4),
        3,
        ErrorCode.PLAN_MISMATCH,
        "heads is 4",
    ),
    "plan of another model": (another_model, 3, ErrorCode.FILE_MISMATCH, "plan.json"),
    "plan of trained weights": (trained_elsewhere, 3, ErrorCode.FILE_MISMATCH, "plan.json"),
    "plan of trained weights that lie beside it": (beside_its_weights, 3, ErrorCode.FILE_MISMATCH, "place/run ..."),
    "no plan": (lambda place: [place / "model", "--plan", place / "p.json"], 3, ErrorCode.FILE_MISSING, "p.json"),
    "graph that is shrunk already": (shrunk_already, 3, ErrorCode.FILE_MISMATCH, "dense.onnx"),
    "output in no folder": (
        lambda place: [*applying(place), "-o", place / "no" / "s.onnx"],
        2,
        ErrorCode.FILE_MISSING,
        "place/no",
    ),
    "label that the model does not know": (strange_label, 3, ErrorCode.LABEL_MISMATCH, "zebra"),
    "negative keep": (lambda place: [*learning(place), "--keep", "-3"], 2, ErrorCode.OUT_OF_RANGE, "--keep"),
    "keep more than there are": (
        lambda place: [*learning(place), "--keep", "3"],
        2,
        ErrorCode.OUT_OF_RANGE,
        "--keep 3",
    ),
    "no label column": (no_label, 3, ErrorCode.COLUMN_MISSING, "verdict, text"),
    "one class only": (one_class, 3, ErrorCode.INVALID_ROWS, "rows.tsv"),
    "empty evaluation set": (empty_evaluation, 3, ErrorCode.TOO_FEW_ROWS, "eval.tsv"),
    "family off the hook": (off_the_hook, 8, ErrorCode.SITE_REFUSED, "deberta-v2"),
    "unknown method": (
        lambda place: [*learning(place), "--method", "dps"],
        2,
        ErrorCode.UNKNOWN_NAME,
        "did you mean dsp?",
    ),
    "drop beyond the metric": (
        lambda place: [*learning(place), "--max-drop", "1"],
        2,
        ErrorCode.OUT_OF_RANGE,
        "--max-drop 1",
    ),
    "budget that no head fits": (
        lambda place: [*searching(place), "--max-drop", "0"],
        2,
        ErrorCode.NOTHING_REMOVED,
        "--max-drop",
    ),
    "too few rows for a guarantee": (
        lambda place: [*searching(place), "--max-drop", "0.01", "--certify", "0.95"],
        3,
        ErrorCode.TOO_FEW_ROWS,
        "rows",
    ),
    "unknown key": (unknown_key, 2, ErrorCode.UNKNOWN_NAME, "did you mean keep?"),
    "unknown option": (lambda place: [*learning(place), "--options", "tau=3"], 2, ErrorCode.UNKNOWN_NAME, "tau"),
    "option of another type": (
        lambda place: [*learning(place), "--options", "cooldown=x"],
        2,
        ErrorCode.INVALID_VALUE,
        "cooldown",
    ),
    "option out of its range": (
        lambda place: [*learning(place), "--options", "warmup=2"],
        2,
        ErrorCode.OUT_OF_RANGE,
        "warmup",
    ),
    "unknown task": (
        lambda place: [place / "model", "--task", "text-classifcation"],
        2,
        ErrorCode.UNKNOWN_NAME,
        "--task text-classifcation",
    ),
    "no such runtime": (
        lambda place: [*timing(place, "dense.onnx"), "--target", "trt"],
        6,
        ErrorCode.DEVICE_MISSING,
        "trt",
    ),
    "neither folder nor graph": (lambda place: ["sites", place / "no"], 3, ErrorCode.FILE_MISSING, "place/no"),
    "benchmark of nothing": (lambda place: timing(place, "no.onnx"), 3, ErrorCode.FILE_MISSING, "no.onnx"),
    "benchmark of a truncated graph": (
        lambda place: timing(place, cut(place / "dense.onnx")),
        3,
        ErrorCode.FILE_UNREADABLE,
        "dense.onnx",
    ),
    "benchmark of truncated data": (
        lambda place: timing(place, cut(place / "dense.onnx.data")),
        3,
        ErrorCode.FILE_UNREADABLE,
        "dense.onnx.data",
    ),
    "benchmark of too long a text": (
        lambda place: [*timing(place, "dense.onnx"), "--seq", "99"],
        3,
        ErrorCode.RUNTIME_FAILED,
        "dense.onnx",
    ),
    "text too long": (lambda place: [place / "model", "--seq", "99"], 3, ErrorCode.OUT_OF_RANGE, "--seq"),
    "no half precision on a CPU": (
        lambda place: [place / "model", "--precision", "fp16", "--provider", "cpu"],
        6,
        ErrorCode.DEVICE_MISSING,
        "fp16",
    ),
}
"""Fault -> command, exit code, code of the error, what its line names."""


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, place: Path, capfd: Cap) -> None:
    spoil, exit_code, error_code, named = BAD[name]
    out = place.parent / "out"
    words = spoil(place)
    takes_out = words[0] not in ("bench", "sites") and "-o" not in words
    done = compress(capfd, *words, *(("-o", out) if takes_out else ()), "--quiet")
    assert (done.code, done.error_code, done.out) == (exit_code, error_code, "")
    assert named in done.error
    assert len(done.error) < 500
    assert [path.name for path in place.parent.iterdir()] == ["place"]


def test_an_output_that_is_there(place: Path, capfd: Cap) -> None:
    out = place.parent / "out"
    out.mkdir()
    done = compress(capfd, place / "model", "-o", out, "--quiet")
    assert (done.code, done.error_code) == (2, ErrorCode.OUTPUT_EXISTS)
    assert "--force" in done.error
    assert list(out.iterdir()) == []
