"""Commands that meet a fault in a folder of valid inputs."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers as hf

from graph_passes import Plan, save, shrink
from graph_passes import load as load_graph
from tests import folders
from tests.tasks.pictures import save_classifier, write_folder
from tests.tasks.questions import wordpieces
from tests.tasks.rows import jsonl
from tests.tasks.tags import bert as tagger

Arguments = list[str | Path]

LEARN = ["--keep", "1", "--training-steps", "2", "--batch-size", "4", "--max-length", "8", "--batch", "1", "--seq", "8"]


def learn_command(inputs: Path) -> Arguments:
    return [inputs / "model", "--data", inputs / "rows.tsv", *LEARN]


def search_command(inputs: Path) -> Arguments:
    """A search without a number of heads, which ends at the maximum drop."""
    return [inputs / "model", "--data", inputs / "rows.tsv", *LEARN[2:], "--method", "astar"]


def gate_command(inputs: Path) -> Arguments:
    """A gate without a number of heads, which needs a budget."""
    return [inputs / "model", "--data", inputs / "rows.tsv", *LEARN[2:], "--method", "dsp"]


def reconstruct_command(inputs: Path, *flags: str | Path) -> Arguments:
    """A run that removes units within a budget."""
    return [inputs / "model", "--data", inputs / "rows.tsv", *LEARN[6:], "--method", "reconstruct", *flags]


def unreachable_budget(inputs: Path) -> Arguments:
    return reconstruct_command(inputs, "--parameters", "1%")


def two_bounds(inputs: Path) -> Arguments:
    return reconstruct_command(inputs, "--speedup", "2", "--latency", "5ms")


def latency_without_unit(inputs: Path) -> Arguments:
    return reconstruct_command(inputs, "--latency", "5")


def too_few_tokens(inputs: Path) -> Arguments:
    (inputs / "few.tsv").write_text("label\ttext\n" + "0\tgood\n1\tbad\n" * 3)
    few: Arguments = ["--data", inputs / "few.tsv", "--eval-data", inputs / "rows.tsv"]
    return reconstruct_command(inputs, *few, "--macs", "60%")


def run_with_plan(inputs: Path, **fields: Any) -> Arguments:
    """A run with the plan, some fields of its only site changed."""
    plan = json.loads((inputs / "plan.json").read_text())
    plan["groups"][0].update(fields)
    (inputs / "plan.json").write_text(json.dumps(plan))
    return [inputs / "model", "--plan", inputs / "plan.json"]


def distill_command(inputs: Path) -> Arguments:
    """A distillation of what a plan keeps, so that nothing is selected first."""
    return [inputs / "model", "--data", inputs / "rows.tsv", *LEARN[2:], "--plan", inputs / "plan.json", "--distill"]


def teacher_of_another_vocabulary(inputs: Path) -> Arguments:
    teacher = shutil.copytree(inputs / "model", inputs / "teacher")
    tokenizer = teacher / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"film"', '"movie"'))
    return [*distill_command(inputs), "--teacher", teacher]


def teacher_of_other_labels(inputs: Path) -> Arguments:
    teacher = shutil.copytree(inputs / "model", inputs / "teacher")
    config = json.loads((teacher / "config.json").read_text())
    config |= {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (teacher / "config.json").write_text(json.dumps(config))
    return [*distill_command(inputs), "--teacher", teacher]


def unknown_columns(inputs: Path) -> Arguments:
    (inputs / "train.tsv").write_text("words\nthe good film\n")
    return [*distill_command(inputs), "--data", inputs / "train.tsv", "--eval-data", inputs / "rows.tsv"]


def missing_folder(inputs: Path) -> Arguments:
    return [inputs / "nowhere"]


def empty_folder(inputs: Path) -> Arguments:
    (inputs / "empty").mkdir()
    return [inputs / "empty"]


def no_tokenizer(inputs: Path) -> Arguments:
    for file in (inputs / "model").glob("tokenizer*"):
        file.unlink()
    return [inputs / "model"]


def pickled_weights(inputs: Path) -> Arguments:
    (inputs / "model" / "model.safetensors").unlink()
    torch.save(folders.bert().state_dict(), inputs / "model" / "pytorch_model.bin")
    return [inputs / "model"]


def remote_code(inputs: Path) -> Arguments:
    config = json.loads((inputs / "model" / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling.Mine"}
    (inputs / "model" / "config.json").write_text(json.dumps(config))
    return [inputs / "model"]


def overflowing_weights(inputs: Path) -> Arguments:
    model = folders.bert()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e25)
    model.save_pretrained(inputs / "model")
    return [inputs / "model"]


def nan_weights(inputs: Path) -> Arguments:
    model = folders.bert()
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    model.save_pretrained(inputs / "model")
    return [inputs / "model"]


def truncated_weights(inputs: Path) -> Arguments:
    truncate(inputs / "model" / "model.safetensors")
    return [inputs / "model"]


def truncated_graph(inputs: Path) -> Arguments:
    truncate(inputs / "dense.onnx")
    return apply_command(inputs)


def truncated_data(inputs: Path) -> Arguments:
    truncate(inputs / "dense.onnx.data")
    return apply_command(inputs)


def data_outside_the_folder(inputs: Path) -> Arguments:
    graph = onnx.load(inputs / "dense.onnx", load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../dense.onnx.data"
    onnx.save(graph, inputs / "dense.onnx")
    return apply_command(inputs)


def apply_command(inputs: Path) -> Arguments:
    return ["apply", inputs / "dense.onnx", "--plan", inputs / "plan.json"]


def another_model(inputs: Path) -> Arguments:
    torch.manual_seed(7)
    folders.save(folders.bert(), inputs / "model")
    return run_with_plan(inputs)


def plan_of_trained_weights(inputs: Path) -> Arguments:
    plan = json.loads((inputs / "plan.json").read_text())
    (inputs / "plan.json").write_text(json.dumps({**plan, "model": "sha256:1", "method": "dsp"}))
    return [inputs / "model", "--plan", inputs / "plan.json"]


def plan_next_to_its_weights(inputs: Path) -> Arguments:
    plan_of_trained_weights(inputs)
    (inputs / "run").mkdir()
    (inputs / "run" / "model.safetensors").touch()
    return [inputs / "model", "--plan", (inputs / "plan.json").rename(inputs / "run" / "plan.json")]


def already_shrunk_graph(inputs: Path) -> Arguments:
    plan = Plan.load(inputs / "plan.json")
    site = plan.sites[0]
    smaller = plan.model_copy(update={"groups": (replace(site, kept=site.kept[1:], scale=()),)})
    save(shrink(load_graph(inputs / "dense.onnx"), smaller).model, inputs / "dense.onnx")
    smaller.save(inputs / "plan.json")
    return apply_command(inputs)


def unknown_label(inputs: Path) -> Arguments:
    config = json.loads((inputs / "model" / "config.json").read_text())
    config |= {"id2label": {"0": "asyncio", "1": "email"}, "label2id": {"asyncio": 0, "email": 1}}
    (inputs / "model" / "config.json").write_text(json.dumps(config))
    text = (inputs / "rows.tsv").read_text().replace("\n0\t", "\nasyncio\t").replace("\n1\t", "\nemail\t")
    (inputs / "rows.tsv").write_text(text + "zebra\tthe plot\n")
    return learn_command(inputs)


def unreadable_image(inputs: Path) -> Arguments:
    path = inputs / "vit"
    write_folder(path / "images", 6)
    (path / "images" / "dark" / "damaged.png").write_bytes(b"no image")
    return [save_classifier(path / "model"), "--data", path / "images", "--macs", "50%"]


def no_image_processor(inputs: Path) -> Arguments:
    path = inputs / "vit"
    write_folder(path / "images", 6)
    (save_classifier(path / "model") / "preprocessor_config.json").unlink()
    return [path / "model", "--data", path / "images", "--macs", "50%"]


def words_without_tags(inputs: Path) -> Arguments:
    return [*tag_command(inputs, words=["who", "in"]), "--label-column", "tags"]


def tags_without_words(inputs: Path) -> Arguments:
    return tag_command(inputs, tags=["O", "O"])


def fewer_tags_than_words(inputs: Path) -> Arguments:
    return tag_command(inputs, words=["who", "in"], tags=["O"])


def tag_command(inputs: Path, **row: list[str]) -> Arguments:
    """A run of a tagger on rows of which the second is the given one."""
    path = inputs / "tagger"
    tagger().save_pretrained(path)
    wordpieces().save_pretrained(path)
    rows = jsonl(inputs / "tags.jsonl", {name: ["O"] for name in row}, row, {name: ["O"] for name in row})
    return [path, "--data", rows, "--macs", "50%"]


def score_command(inputs: Path) -> Arguments:
    """A run of a regression on rows of which the last has no number."""
    folders.save(folders.bert(num_labels=1), inputs / "scorer")
    with (inputs / "rows.tsv").open("a") as rows:
        rows.write("high\tthe plot\n")
    return [inputs / "scorer", "--data", inputs / "rows.tsv", "--task", "regression", "--macs", "50%"]


def unknown_pooling(inputs: Path) -> Arguments:
    encoder = folders.save_sentence_encoder(inputs / "encoder", pooling="cls")
    (encoder / "1_Pooling" / "config.json").write_text('{"pooling_mode_median_tokens": true}')
    return [encoder, "--data", inputs / "rows.tsv", "--macs", "50%"]


def bench_command(inputs: Path, graph: str | Path) -> Arguments:
    return ["bench", inputs / "dense.onnx" if isinstance(graph, Path) else inputs / graph, inputs / "dense.onnx"]


def no_label_column(inputs: Path) -> Arguments:
    text = (inputs / "rows.tsv").read_text()
    (inputs / "rows.tsv").write_text(text.replace("label\ttext", "verdict\ttext"))
    return learn_command(inputs)


def one_class(inputs: Path) -> Arguments:
    text = (inputs / "rows.tsv").read_text()
    (inputs / "rows.tsv").write_text(text.replace("\n1\t", "\n0\t"))
    return learn_command(inputs)


def empty_evaluation(inputs: Path) -> Arguments:
    (inputs / "eval.tsv").write_text("label\ttext\n")
    return [*learn_command(inputs), "--eval-data", inputs / "eval.tsv"]


def unsupported_family(inputs: Path) -> Arguments:
    config = hf.FNetConfig(vocab_size=25, hidden_size=16, num_hidden_layers=1, intermediate_size=20)
    folders.save(hf.FNetForSequenceClassification(config), inputs / "fnet")
    return [inputs / "fnet", "--data", inputs / "rows.tsv", *LEARN]


def unknown_key(inputs: Path) -> Arguments:
    (inputs / "model" / "compress.toml").write_text("kep = 3")
    return [inputs / "model"]


def truncate(file: Path) -> Path:
    os.truncate(file, file.stat().st_size // 2)
    return file
