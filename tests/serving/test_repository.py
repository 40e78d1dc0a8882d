"""A model in a repository: its files, its warm-up, and its atomic replacement."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

import graph_passes
from compressor.answers import EMBEDDING, STATES
from compressor.config.request import ServeRequest
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.latency.local_engine import load_engine
from compressor.model_folder import load_processor
from compressor.results import NoteCode
from compressor.serving import export, triton_config
from tests import folders
from tests.faults import fails_with
from tests.serving.outputs import pruned_folder, run_folder
from tests.targets.graphs import parsed
from tests.tasks import pictures


def test_a_model_is_exported_for_onnx_runtime(out: Path, tmp_path: Path) -> None:
    exported = export(ServeRequest(out=out, repository=tmp_path / "repository"))
    assert exported.model == tmp_path / "repository" / "half"
    assert (exported.backend, exported.device, exported.max_batch) == ("onnxruntime", "cpu", 8)
    graph = exported.model / "1" / "model.onnx" / "model.onnx"
    assert graph.read_bytes() == (out / "engine.onnx").read_bytes()
    assert graph_passes.data_files(graph_passes.load(graph)) == {graph.with_name("engine.onnx.data")}
    config = triton_config.load(exported.model / "config.pbtxt")
    assert [(entry.name, list(entry.dims)) for entry in config.input] == [("input_ids", [-1]), ("attention_mask", [-1])]
    assert [(entry.name, list(entry.dims)) for entry in config.output] == [("logits", [16])]
    assert {note.code for note in exported.notes} == {NoteCode.SERVER_REQUIREMENT, NoteCode.STORAGE_URI}
    assert {path.name for path in tmp_path.iterdir()} == {"repository"}


def test_a_sentence_encoder_is_served_with_the_inputs_and_outputs_of_its_graph(tmp_path: Path) -> None:
    out = pruned_folder(folders.save_sentence_encoder(tmp_path / "out"))
    exported = export(ServeRequest(out=out, repository=tmp_path / "repository"))
    config = triton_config.load(exported.model / "config.pbtxt")
    served = {entry.name: list(entry.dims) for entry in (*config.input, *config.output)}
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    assert served == {**{name: [-1] for name in inputs}, EMBEDDING: [16], STATES: [1, 16]}
    endpoint = load_engine(out / "engine.onnx", tmp_path)
    assert {tensor.name for tensor in endpoint.inputs} == set(inputs)
    batch = endpoint.trial_batch(2, 8, seed=0)
    assert {name: list(array.shape[1:]) for name, array in endpoint.infer(batch).items()} == {
        EMBEDDING: [16],
        STATES: [1, 16],
    }


def test_the_warm_up_of_a_sentence_encoder_has_single_texts(tmp_path: Path) -> None:
    prompts = {"prompts": {"text": "plot "}, "default_prompt_name": "text"}
    out = pruned_folder(folders.save_sentence_encoder(tmp_path / "out", config_sentence_transformers=prompts))
    (tmp_path / "pairs.tsv").write_text("label\tanchor\tpositive\n1\tgood film\tone two three\n0\tbad\tfilm\n")
    exported = export(ServeRequest(out=out, repository=tmp_path / "r", data=str(tmp_path / "pairs.tsv")))
    config = triton_config.load(exported.model / "config.pbtxt")
    warmed = {
        tuple(np.frombuffer((exported.model / "warmup" / tensor.input_data_file).read_bytes(), np.int64).tolist())
        for request in config.model_warmup
        for name, tensor in request.inputs.items()
        if name == "input_ids"
    }
    assert warmed == {(2, 8, 6, 3), (2, 8, 15, 16, 17, 3)}


def warmed_pixels(model: Path) -> np.ndarray:
    """The pixels of the first warm-up request of an exported model."""
    pixels = triton_config.load(model / "config.pbtxt").model_warmup[0].inputs["pixel_values"]
    return np.frombuffer((model / "warmup" / pixels.input_data_file).read_bytes(), np.float32)


def processed(folder: Path, number: int) -> np.ndarray:
    """The pixels that the processor of a folder makes of a picture."""
    processor = load_processor(folder, images=True)
    return np.asarray(processor(pictures.picture(number), return_tensors="np")["pixel_values"]).ravel()


def test_an_image_classifier_is_served_and_checked_with_images_as_tensors(tmp_path: Path) -> None:
    out = pruned_folder(pictures.save_classifier(tmp_path / "out"))
    images = pictures.write_folder(tmp_path / "images", 3, labelled=False)
    exported = export(ServeRequest(out=out, repository=tmp_path / "repository", data=str(images)))
    config = triton_config.load(exported.model / "config.pbtxt")
    assert {entry.name: list(entry.dims) for entry in (*config.input, *config.output)} == {
        "pixel_values": [3, 16, 16],
        "logits": [3],
    }
    assert NoteCode.RANDOM_INPUTS not in {note.code for note in exported.notes}
    written = warmed_pixels(exported.model)
    assert np.array_equal(written, processed(out, 0))
    (tmp_path / "rows.tsv").write_text("before\tphoto\nimages/000.png\timages/001.png\n")
    columns: dict[str, Any] = {"data": str(tmp_path / "rows.tsv"), "image_column": "photo"}
    of_column = export(ServeRequest(out=out, repository=tmp_path / "repository", name="column", **columns))
    assert np.array_equal(warmed_pixels(of_column.model), processed(out, 1))
    endpoint = load_engine(out / "engine.onnx", tmp_path)
    assert endpoint.infer(endpoint.trial_batch(2, 8, seed=0))["logits"].shape == (2, 3)


def test_the_warm_up_has_the_shortest_and_the_longest_row(out: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("the good film\nthe film\none two three four five six\n")
    exported = export(ServeRequest(out=out, repository=tmp_path / "r", data=str(tmp_path / "rows.txt")))
    config = triton_config.load(exported.model / "config.pbtxt")
    assert exported.warmups == len(config.model_warmup) == 4
    tokenizer = folders.tokenizer()
    for text, requests in (
        ("the film", config.model_warmup[:2]),
        ("one two three four five six", config.model_warmup[2:]),
    ):
        assert [request.batch_size for request in requests] == [1, 8]
        for request in requests:
            tensor = request.inputs["input_ids"]
            ids = np.frombuffer((exported.model / "warmup" / tensor.input_data_file).read_bytes(), np.int64)
            assert ids.tolist() == tokenizer(text)["input_ids"]
            assert list(tensor.dims) == [len(ids)]


def test_a_text_without_a_token_is_refused(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "copy")
    tokenizer = folders.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save_pretrained(tmp_path / "copy")
    (tmp_path / "rows.jsonl").write_text('{"text": "good"}\n{"text": ""}\n')
    request = ServeRequest(out=tmp_path / "copy", repository=tmp_path / "r", data=str(tmp_path / "rows.jsonl"))
    with fails_with(ErrorCode.INVALID_ROWS, value=""):
        export(request)


def test_the_python_backend_serves_the_plain_graph(out: Path, tmp_path: Path) -> None:
    request = ServeRequest(
        out=out, repository=tmp_path, name="plain", backend="python", plain=True, max_batch=3, threads=2
    )
    exported = export(request)
    assert (exported.model / "1" / "model.onnx" / "model.onnx.data").is_file()
    assert "class TritonPythonModel" in (exported.model / "1" / "model.py").read_text()
    assert triton_config.load(exported.model / "config.pbtxt").max_batch_size == 3


def openvino_folder(folder: Path) -> Path:
    """The folder of a run for OpenVINO, with stand-ins for its engine."""
    run_folder(folder, target="openvino", session={"runtime": "openvino 2026.4.1", "provider": "CPU"})
    (folder / "engine.onnx").unlink()
    for name in ("engine.xml", "engine.bin"):
        (folder / name).write_text(name)
    return folder


def test_an_engine_of_openvino_is_served_as_it_was_measured(tmp_path: Path) -> None:
    out = openvino_folder(tmp_path / "run")
    exported = export(ServeRequest(out=out, repository=tmp_path / "r"))
    assert (exported.backend, exported.device, exported.max_batch) == ("python", "cpu", 8)
    files = {path.name for path in (exported.model / "1").iterdir()}
    assert files == {"engine.xml", "engine.bin", "model.py", "session.py", "batches.py"}
    codes = {note.code for note in exported.notes}
    assert NoteCode.SERVER_REQUIREMENT in codes
    assert NoteCode.ENGINE_NOT_SERVED not in codes
    for fields in ({"plain": True}, {"backend": "onnxruntime"}, {"plain": True, "backend": "python"}):
        request = ServeRequest(out=out, repository=tmp_path / "r", name="graph", force=True, **fields)
        served = export(request)
        assert NoteCode.ENGINE_NOT_SERVED in {note.code for note in served.notes}
        assert not (served.model / "1" / "engine.xml").exists()
    on_gpu: tuple[dict[str, Any], ...] = ({"device": "gpu"}, {"gpus": (0,)})
    for placed in on_gpu:
        with pytest.raises(UsageError) as error:
            export(ServeRequest(out=out, repository=tmp_path / "r", name="other", **placed))
        assert error.value.code is ErrorCode.CONTRADICTION


def test_a_graph_that_fixes_its_batch_is_served_without_batches(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "fixed")
    for name in ("engine.onnx", "model.onnx"):
        graph_passes.save(parsed("y = Mul (x, x)", "float[2, 3] x", "float[2, 3] y"), tmp_path / "fixed" / name)
    exported = export(ServeRequest(out=tmp_path / "fixed", repository=tmp_path / "r"))
    config = triton_config.load(exported.model / "config.pbtxt")
    assert (exported.max_batch, config.max_batch_size, list(config.input[0].dims)) == (0, 0, [2, 3])
    assert list(config.model_warmup[0].inputs["x"].dims) == [2, 3]
    assert {NoteCode.NO_BATCHING, NoteCode.RANDOM_INPUTS} <= {note.code for note in exported.notes}
    with pytest.raises(UsageError) as error:
        export(ServeRequest(out=tmp_path / "fixed", repository=tmp_path / "r", name="other", max_batch=4))
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.CONTRADICTION, "max_batch")


def test_a_folder_whose_engine_is_missing_is_refused(out: Path, tmp_path: Path) -> None:
    """As an interrupted build leaves it; the graph in floats is another engine."""
    shutil.copytree(out, tmp_path / "copy")
    (tmp_path / "copy" / "engine.onnx").unlink()
    with pytest.raises(InputError) as error:
        export(ServeRequest(out=tmp_path / "copy", repository=tmp_path / "r"))
    assert error.value.code is ErrorCode.FILE_MISSING
    assert export(ServeRequest(out=tmp_path / "copy", repository=tmp_path / "r", plain=True)).model.is_dir()


def refuse(*_: Any) -> str:
    raise OSError("the disk is full")


def test_a_model_is_replaced_as_a_whole_or_not_at_all(out: Path, tmp_path: Path) -> None:
    request = ServeRequest(out=out, repository=tmp_path / "r", max_batch=2)
    with pytest.raises(OSError, match="full"):
        export(request, service=refuse)
    assert list((tmp_path / "r").iterdir()) == []
    export(request)
    with pytest.raises(UsageError) as error:
        export(request)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.OUTPUT_EXISTS, request.model_dir)
    larger = request.model_copy(update={"force": True, "max_batch": 5})
    with pytest.raises(OSError, match="full"):
        export(larger, service=refuse)
    assert triton_config.load(request.model_dir / "config.pbtxt").max_batch_size == 2
    assert {path.name for path in tmp_path.iterdir()} == {"r"}
    export(larger)
    assert triton_config.load(request.model_dir / "config.pbtxt").max_batch_size == 5


def test_a_folder_that_is_not_a_model_is_not_replaced(out: Path, tmp_path: Path) -> None:
    request = ServeRequest(out=out, repository=tmp_path / "r", force=True)
    request.model_dir.mkdir(parents=True)
    (request.model_dir / "notes.txt").write_text("mine")
    with pytest.raises(UsageError) as error:
        export(request)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.OUTPUT_EXISTS, request.model_dir)
    assert [path.name for path in request.model_dir.iterdir()] == ["notes.txt"]


def test_a_model_is_written_outside_of_the_repository_if_possible(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may watch the repository and would load an incomplete model."""
    folders_used: list[set[str]] = []

    def record_folder(repository: Path, *_: Any) -> str:
        folders_used.append({path.name.partition("-")[0] for path in repository.iterdir()})
        return "kind: InferenceService\n"

    export(ServeRequest(out=out, repository=tmp_path / "r"), service=record_folder)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    export(ServeRequest(out=out, repository=tmp_path / "r", name="b"), service=record_folder)
    assert folders_used == [set(), {".exporting", "half", "kserve.yaml"}]


@pytest.mark.parametrize(
    ("fields", "options", "code"),
    [
        ({"recipe": {"target": "trt"}}, {}, NoteCode.ENGINE_MISSING),
        ({"session": {"provider": "CPUExecutionProvider", "kernel": "k.so"}}, {}, NoteCode.KERNEL_NOT_SERVED),
        ({}, {"backend": "python"}, NoteCode.SERVER_REQUIREMENT),
        ({}, {"device": "gpu"}, NoteCode.SERVER_REQUIREMENT),
    ],
)
def test_notes_say_how_the_served_model_differs(
    fields: dict[str, Any], options: dict[str, Any], code: NoteCode, tmp_path: Path
) -> None:
    out = run_folder(tmp_path / "out", **fields)
    plain = export(ServeRequest(out=run_folder(tmp_path / "plain"), repository=tmp_path / "r")).notes
    notes = export(ServeRequest(out=out, repository=tmp_path / "r", **options)).notes
    assert [note.code for note in notes if note not in plain] == [code]


@pytest.mark.parametrize(
    ("fields", "device"),
    [
        ({}, "cpu"),
        ({"session": {"provider": "CUDAExecutionProvider"}}, "gpu"),
        ({"target": "trt"}, "gpu"),
    ],
)
def test_a_model_is_served_on_the_device_of_its_run(fields: dict[str, Any], device: str, tmp_path: Path) -> None:
    out = run_folder(tmp_path / "out", **fields)
    assert export(ServeRequest(out=out, repository=tmp_path / "r", backend="onnxruntime")).device == device
