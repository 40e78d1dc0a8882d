"""Every bad input: its own exit code, one line with the thing, the fault and the mend, and nothing left behind."""

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

from compressor.model_folder import example_inputs, load
from compressor.units import find_sites, keep_all
from graph_passes import Plan, save, shrink
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


BAD: dict[str, tuple[Callable[[Path], Words], int, str]] = {
    "missing folder": (missing, 3, "nowhere: no such folder; give"),
    "empty folder": (empty, 3, "empty: "),
    "no tokenizer": (no_tokenizer, 3, "no tokenizer; save"),
    "pickled weights": (pickled, 3, "--allow-pickle"),
    "remote code": (remote_code, 3, "--trust-remote-code"),
    "NaN weights": (not_a_number, 3, "model: "),
    "truncated safetensors": (truncated_weights, 3, "model.safetensors"),
    "truncated ONNX": (truncated_graph, 3, "dense.onnx: "),
    "truncated external data": (truncated_data, 3, "its data file dense.onnx.data is too short"),
    "external data outside": (data_outside, 3, "outside the graph's folder"),
    "plan with an unknown site": (
        lambda place: following(place, name="bert.nowhere"),
        3,
        "plan.json: the model has no attention site bert.nowhere, its sites are",
    ),
    "head out of range": (lambda place: following(place, kept=[0, 2]), 3, "head 2 is out of range"),
    "head twice": (lambda place: following(place, kept=[1, 1]), 3, "without repeats"),
    "plan with other heads": (
        lambda place: following(place, heads=4, kv_heads=4),
        3,
        "heads is 4 in the plan, 2 in the model; use a plan that was learned on this model",
    ),
    "plan of another model": (another_model, 3, "the plan of another model"),
    "plan of trained weights": (
        trained_elsewhere,
        3,
        "plan.json: the plan (dsp) belongs to weights that were trained along with it, not to those of ",
    ),
    "plan of trained weights that lie beside it": (beside_its_weights, 3, "place/run ..."),
    "no plan": (lambda place: [place / "model", "--plan", place / "p.json"], 3, "p.json: there is no such plan; give"),
    "graph that is shrunk already": (shrunk_already, 3, "plan.json: the graph seems to be shrunk already"),
    "output in no folder": (
        lambda place: [*applying(place), "-o", place / "no" / "s.onnx"],
        2,
        "no: no such folder; make",
    ),
    "label that the model does not know": (
        strange_label,
        3,
        "rows.tsv: label 'zebra' is not among the model's (asyncio, email, id2label in its config.json); mend",
    ),
    "negative keep": (lambda place: [*learning(place), "--keep", "-3"], 2, "--keep '-3': out of range"),
    "keep more than there are": (
        lambda place: [*learning(place), "--keep", "3"],
        2,
        "--keep 3: there are 2 heads to choose from",
    ),
    "no label column": (no_label, 3, "no label column among verdict, text"),
    "one class only": (one_class, 3, "rows.tsv"),
    "empty evaluation set": (empty_evaluation, 3, "eval.tsv"),
    "family off the hook": (off_the_hook, 8, "deberta-v2: its attention"),
    "unknown method": (
        lambda place: [*learning(place), "--method", "dps"],
        2,
        "--method 'dps': unknown; did you mean dsp? choose one of dsp, dsp-pipelined",
    ),
    "drop beyond the metric": (
        lambda place: [*learning(place), "--max-drop", "1"],
        2,
        "--max-drop 1: accuracy is a share, so this allows anything; give 0.01",
    ),
    "budget that no head fits": (
        lambda place: [*searching(place), "--max-drop", "0"],
        2,
        "no head was removed: astar takes heads that cost less than --max-drop, which is 0; raise it",
    ),
    "too few rows for a guarantee": (
        lambda place: [*searching(place), "--max-drop", "0.01", "--guarantee", "0.95"],
        3,
        "evaluation rows: half of them certify a drop of at most 0.01 with 95% confidence only from",
    ),
    "unknown key": (unknown_key, 2, "unknown key kep; did you mean keep?"),
    "unknown option": (lambda place: [*learning(place), "--options", "tau=3"], 2, "tau"),
    "option of another type": (
        lambda place: [*learning(place), "--options", "cooldown=x"],
        2,
        "option cooldown='x' of",
    ),
    "option out of its range": (lambda place: [*learning(place), "--options", "warmup=2"], 2, "warmup 2"),
    "unknown task": (
        lambda place: [place / "model", "--task", "text-classifcation"],
        2,
        "--task text-classifcation: no such task; name one such as text-classification",
    ),
    "no such runtime": (
        lambda place: [*timing(place, "dense.onnx"), "--target", "trt"],
        6,
        "trt: there is no NVIDIA GPU",
    ),
    "neither folder nor graph": (lambda place: ["sites", place / "no"], 3, "no: no such folder or .onnx file; give"),
    "benchmark of nothing": (lambda place: timing(place, "no.onnx"), 3, "no.onnx: there is no such ONNX file; give"),
    "benchmark of a truncated graph": (lambda place: timing(place, cut(place / "dense.onnx")), 3, "maybe truncated"),
    "benchmark of truncated data": (
        lambda place: timing(place, cut(place / "dense.onnx.data")),
        3,
        "its data file dense.onnx.data is too short",
    ),
    "benchmark of too long a text": (
        lambda place: [*timing(place, "dense.onnx"), "--seq", "99"],
        3,
        "dense.onnx: cannot run at batch 1, length 99, maybe more tokens than it has positions for; ask for another",
    ),
    "text too long": (lambda place: [place / "model", "--seq", "99"], 3, "takes at most 20 tokens"),
    "no half precision on a CPU": (
        lambda place: [place / "model", "--precision", "fp16", "--provider", "cpu"],
        6,
        "fp16: ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, place: Path, capfd: Cap) -> None:
    spoil, code, message = BAD[name]
    out = place.parent / "out"
    words = spoil(place)
    takes_out = words[0] not in ("bench", "sites") and "-o" not in words
    done = compress(capfd, *words, *(("-o", out) if takes_out else ()), "--quiet")
    assert (done.code, done.out) == (code, "")
    assert message in done.error
    assert len(done.error) < 500
    assert [path.name for path in place.parent.iterdir()] == ["place"]


def test_an_output_that_is_there(place: Path, capfd: Cap) -> None:
    out = place.parent / "out"
    out.mkdir()
    done = compress(capfd, place / "model", "-o", out, "--quiet")
    assert (done.code, done.error) == (
        2,
        f"{out}: is there already; add --force to replace it, or name another folder (-o)",
    )
    assert list(out.iterdir()) == []
