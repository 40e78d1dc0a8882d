"""Files as users have them: half precision, other names, questions, sentences; and the folder that a run writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import compressor
import graph_passes
from compressor.config.run import Recipe
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import load
from compressor.models.forwards import tensors_of
from compressor.results import NoteCode, Report
from compressor.tasks import Task, open_data
from compressor.tasks.base import Batch
from tests import folders
from tests.command import compress
from tests.folders import rows_config
from tests.graph.files import LENGTH, arrays, classifier, halve, image_classifier, npz, texts, write_graph
from tests.graph_passes.graphs import graph
from tests.tasks import pictures
from tests.tasks.questions import bert as reader
from tests.tasks.questions import row as question
from tests.tasks.questions import wordpieces
from tests.tasks.rows import jsonl


def both_outputs(path: Path, task: Task, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """What a task scores: of the network of a graph, and of the graph itself."""
    model = load(path).model
    inputs = {name: batch[name] for name in model.input_specs}
    with torch.no_grad():
        network = task.logits(model.network(**tensors_of(inputs)))
    session = ort.InferenceSession(model.file)
    arrays = session.run(None, inputs)
    outputs = dict(zip((output.name for output in session.get_outputs()), arrays, strict=True))
    return network, task.logits(task.scored_outputs(outputs, inputs))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph in half precision whose output is `scores`, rows of text, and the folder of another model's tokenizer."""
    path = tmp_path_factory.mktemp("files")
    halve(classifier(path / "whole" / "model.onnx", has_biases=True, names=("scores",)), path / "graph" / "model.onnx")
    folders.save(folders.bert(), path / "model")
    texts(path / "rows.tsv")
    return path


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    recipe = Recipe(
        model=work / "graph" / "model.onnx",
        tokenizer=work / "model",
        data=str(work / "rows.tsv"),
        test_data=str(work / "rows.tsv"),
        macs=0.6,
        max_length=8,
        batch=1,
        seconds=0.02,
        out=work / "out",
    )
    return compressor.compress(recipe)


def test_a_graph_in_half_precision_under_other_names(report: Report, work: Path) -> None:
    assert all(proof.holds for proof in report.proofs)
    assert NoteCode.OUTPUT_CHOSEN in {note.code for note in report.notes}
    assert report.task == "text-classification"
    for name in ("model.onnx", "engine.onnx"):
        (output,) = onnx.load(work / "out" / name).graph.output
        assert (output.name, output.type.tensor_type.elem_type) == ("scores", onnx.TensorProto.FLOAT16)


def test_the_axes_of_an_output_that_the_file_does_not_record(tmp_path: Path) -> None:
    file = classifier(tmp_path / "model.onnx", has_biases=True)
    recorded = load(file, rows=arrays()).model.output_specs
    model = onnx.load(file)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, file)
    assert load(file, rows=arrays()).model.output_specs == recorded


def test_files_of_the_tokenizer_are_copied_and_those_of_its_model_are_not(report: Report, work: Path) -> None:
    names = {path.name for path in (work / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "plan.json", "report.json"} <= names
    assert not {"config.json", "model.safetensors"} & names


def test_commands_take_the_folder_of_a_file(
    report: Report, work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = work / "out"
    timed = {speed.seq for speed in report.speeds}
    assert {row["seq"] for row in compress(capfd, "bench", out, "--seconds", "0.02", "--json").json} == timed
    listed = compress(capfd, "sites", out, "--json").json
    assert {row["type"] for row in listed} <= {"heads", "neurons"}
    applied = compress(
        capfd, "apply", work / "graph" / "model.onnx", "--plan", out / "plan.json", "-o", tmp_path / "a", "--quiet"
    )
    assert applied.error_code == ErrorCode.FILE_MISMATCH
    assert str(out / "model.onnx") in applied.error


def test_answers_of_questions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = reader()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    wordpieces().save_pretrained(tmp_path)
    ends = ("start_logits", "end_logits")
    write_graph(model, tmp_path / "model.onnx", ends)
    rows = jsonl(tmp_path / "rows.jsonl", *(question("paris built the tall tower", "who built") for _ in range(4)))
    folder = load(tmp_path)
    task = open_data(rows_config(rows, rows, rows, max_length=16, stride=3), folder).task
    assert (folder.task, task.outputs) == ("question-answering", ends)
    batch = task.loss_inputs(task.collate(list(open_data(rows_config(rows, rows, rows), folder).train)))
    assert np.allclose(*both_outputs(tmp_path, task, batch), atol=1e-5)
    network: Any = folder.network
    loss = network(**tensors_of(batch)).loss
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("pooled", [False, True])
def test_embeddings_of_sentences(pooled: bool, tmp_path: Path) -> None:
    """Pooled outside of the graph, and inside, where the embeddings are its own output."""
    torch.manual_seed(0)
    folders.save_sentence_encoder(tmp_path / "whole")
    whole = load(tmp_path / "whole")
    path = shutil.copytree(tmp_path / "whole", tmp_path / "graph")
    (path / "model.safetensors").unlink()
    outputs = ("last_hidden_state", "sentence_embedding") if pooled else ("last_hidden_state",)
    names = ("token_embeddings", *outputs[1:])
    encoder: Any = whole.model
    encoder.pool_in_graph = False
    write_graph(whole.model, path / "model.onnx", outputs, names)
    rows = tmp_path / "rows.tsv"
    rows.write_text("label\tsentence1\tsentence2\n" + "1\tgood film\tgood plot\n0\tbad film\tone two\n" * 4)
    folder = load(path)
    task = open_data(rows_config(*[str(rows)] * 3), folder).task
    batch = task.collate(list(open_data(rows_config(*[str(rows)] * 3), folder).train))
    network, graph = both_outputs(path, task, batch)
    assert np.allclose(network, graph, atol=1e-5)
    with torch.no_grad():
        inputs = tensors_of({name: batch[name] for name in ("input_ids", "attention_mask")})
        expected = whole.model(**inputs).sentence_embedding
    assert np.allclose(network, expected.numpy(), atol=1e-5)


def test_an_output_among_several_has_the_name_of_the_task(tmp_path: Path) -> None:
    whole = classifier(tmp_path / "model.onnx", outputs=("logits", "logits"), names=("first", "second"))
    folders.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError) as error:
        open_data(rows_config(str(texts(tmp_path / "rows.tsv"))), load(whole))
    assert (error.value.code, error.value.details["output"]) == (ErrorCode.UNSUPPORTED_MODEL, "logits")


def test_token_types_that_a_tokenizer_does_not_return_are_zero(tmp_path: Path) -> None:
    """As in the model, whose input of token types has zeros by default."""
    file = classifier(tmp_path / "model.onnx")
    model = onnx.load(file)
    for node in model.graph.node:
        node.output[:] = ["before" if name == "logits" else name for name in node.output]
    axes = ["batch", "seq"]
    model.graph.input.append(onnx.helper.make_tensor_value_info("token_type_ids", onnx.TensorProto.INT64, axes))
    model.graph.node.extend([
        onnx.helper.make_node("Cast", ["token_type_ids"], ["types"], "cast", to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("ReduceMean", ["types"], ["mean"], "mean", axes=[1]),
        onnx.helper.make_node("Add", ["before", "mean"], ["logits"], "add"),
    ])  # fmt: skip
    onnx.save(model, file)
    folders.tokenizer().save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    names = ["input_ids", "attention_mask"]
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_input_names": names}))
    folder = load(file)
    data = open_data(rows_config(str(texts(tmp_path / "rows.tsv"))), folder, drawn_rows=8)
    inputs = data.task.model_inputs(data.task.collate(list(data.train.select(range(3)))))
    assert inputs.keys() >= folder.model.input_specs.keys()
    assert not inputs["token_type_ids"].any()
    assert np.isfinite(folder.model.run(inputs)["logits"]).all()


def test_arrays_need_no_task(tmp_path: Path) -> None:
    file = classifier(tmp_path / "model.onnx", names=("scores",))
    rows = npz(tmp_path / "rows.npz", input_ids=np.ones((9, 8), np.int64), attention_mask=np.ones((9, 8), np.int64))
    assert load(file, rows=dict(np.load(rows))).task == "arrays"


def test_arrays_of_the_only_length_that_a_graph_takes(tmp_path: Path) -> None:
    model = onnx.load(classifier(tmp_path / "model.onnx", has_biases=True))
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = LENGTH
    onnx.save(model, tmp_path / "model.onnx")
    npz(tmp_path / "rows.npz", **arrays())
    sizes: dict[str, Any] = {"batch": 1, "seconds": 0.02}
    recipe = Recipe(
        model=tmp_path / "model.onnx", data=str(tmp_path / "rows.npz"), macs=0.8, out=tmp_path / "out", **sizes
    )
    report = compressor.compress(recipe)
    assert all(proof.holds for proof in report.proofs)
    assert {speed.seq for speed in report.speeds} == {None}


def test_a_graph_in_double_precision_is_refitted(tmp_path: Path) -> None:
    body = """h = MatMul(x, up)  b = Add(h, bias)  r = Relu(b)  d = MatMul(r, down)  y = Add(d, x)
        m = ReduceMean <keepdims = 0> (y, axis)  logits = MatMul(m, classes)"""
    weights = "double[8, 12] up, double[12] bias, double[12, 8] down, double[8, 3] classes, int64[1] axis = {1}"
    model = graph(body, weights, inputs="double[B, S, 8] x", outputs="double[B, 3] logits")
    graph_passes.save(model, tmp_path / "model.onnx")
    npz(tmp_path / "rows.npz", x=np.random.default_rng(0).normal(size=(60, 5, 8)))
    sizes: dict[str, Any] = {"batch": 1, "seconds": 0.02}
    recipe = Recipe(
        model=tmp_path / "model.onnx", data=str(tmp_path / "rows.npz"), macs=0.6, out=tmp_path / "out", **sizes
    )
    report = compressor.compress(recipe)
    assert all(proof.holds for proof in report.proofs)
    (output,) = onnx.load(tmp_path / "out" / "model.onnx").graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE


def test_notes_name_the_file(report: Report) -> None:
    (text,) = (note.text for note in report.notes if note.code is NoteCode.WEIGHTS_CHANGED)
    assert "the file as it was" in text


def test_an_image_classifier_beside_its_processor(tmp_path: Path) -> None:
    file = image_classifier(tmp_path / "graph")
    rows = pictures.write_folder(tmp_path / "rows", 48)
    recipe = Recipe(model=file, data=str(rows), macs=0.75, batch=(1,), seconds=0.02, threads=1, out=tmp_path / "out")
    report = compressor.compress(recipe)
    assert report.task == "image-classification"
    assert report.proofs
    assert all(proof.holds for proof in report.proofs)
    plan = report.plan
    assert plan.heads_kept + plan.neurons_kept < plan.heads + plan.neurons
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    folder = load(tmp_path / "out")
    assert (folder.task, folder.image_size) == ("image-classification", (3, pictures.SIZE, pictures.SIZE))


def test_texts_without_labels_are_compared_with_the_whole_graph(tmp_path: Path) -> None:
    file = classifier(tmp_path / "model.onnx")
    folders.tokenizer().save_pretrained(tmp_path)
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\n" + "\n".join(f"good film {word}" for word in folders.WORDS * 4) + "\n")
    data = open_data(rows_config(str(rows)), load(file), drawn_rows=8)
    assert data.scores_eval
    assert len(data.test)
    assert NoteCode.ANSWERS_AS_LABELS in {note.code for note in data.notes}


def test_the_plan_of_another_graph_is_refused_by_its_group(
    report: Report, work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = work / "out" / "plan.json"
    torch.manual_seed(1)
    sizes = {**folders.SIZES, "intermediate_size": 24}
    models = {
        "wider": (BertForSequenceClassification(BertConfig(**sizes)), report.plan.feed_forwards[0].name),
        "trained otherwise": (folders.bert(), None),
    }
    for name, (model, group) in models.items():
        file = write_graph(model, tmp_path / name / "model.onnx")
        flags = ("--tokenizer", work / "model", "--data", work / "rows.tsv", "--plan", plan)
        refused = compress(capfd, file, *flags, "-o", tmp_path / "out", "--quiet")
        assert (refused.code, refused.error_code) == (3, ErrorCode.FILE_MISMATCH)
        assert refused.details.get("group") == group
        assert str(file) in refused.error
        assert not (tmp_path / "out").exists()
