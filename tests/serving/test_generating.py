"""A model that generates becomes a folder of a Triton repository that stands alone and sends its text in parts."""

from __future__ import annotations

import ast
import json
import queue
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from compressor.config.check import CheckRequest
from compressor.config.request import ServeRequest
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.generation.runner import load_engine
from compressor.generation.weights import Rounding
from compressor.latency import check
from compressor.report import JSON_NAME
from compressor.results import NoteCode
from compressor.serving import export, kserve, model_files, triton_config
from compressor.serving.model_files import GENERATION
from compressor.targets import WeightPrecision, target
from compressor.targets.caches import DECODER, ENCODER
from compressor.targets.onnxruntime.sessions import engine_of
from graph_passes import load, save
from graph_passes.flow.caches import IN_PLACE
from graph_passes.passes import FuseForOrt, Normalize
from tests.faults import fails_with
from tests.generation.counting import POSITIONS, TEMPLATE, write_decoder_only, write_encoder_decoder
from tests.generation.exported import exported
from tests.serving import backend_stand_in, triton_server
from tests.serving.outputs import report

SERVED = ("numpy", "onnxruntime", "torch", "transformers")
"""What the Python of a server has."""


def run_folder(folder: Path, *, has_encoder: bool = False) -> Path:
    """The folder of a run on a model that counts."""
    out = write_encoder_decoder(folder) if has_encoder else write_decoder_only(folder, template=TEMPLATE)
    (out / JSON_NAME).write_text(report().model_dump_json())
    return out


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("run") / "counting")


@pytest.fixture(scope="module")
def model(counting: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model in a repository."""
    repository = tmp_path_factory.mktemp("triton") / "repository"
    return export(ServeRequest(out=counting, repository=repository, threads=1)).model


def served(model: Path, *requests: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The responses of each request to a model in a process that has no other file of this repository."""
    config = json_format.MessageToDict(triton_config.load(model / "config.pbtxt"), preserving_proto_field_name=True)
    done = subprocess.run(
        [sys.executable, "-I", backend_stand_in.__file__, model / "1"],
        input=json.dumps({"config": config, "requests": requests}),
        cwd=model,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for name in ("compressor", "graph_passes"):
        assert Path(result["files"][name]).is_relative_to(model / "1")
    responses: list[list[dict[str, Any]]] = result["responses"]
    return responses


def text_of(responses: list[dict[str, Any]]) -> str:
    return "".join(response["text_output"] for response in responses)


def test_texts_are_those_of_the_engine_on_this_machine(counting: Path, model: Path) -> None:
    requests: list[dict[str, Any]] = [
        {"text_input": "three four", "max_tokens": 4},
        {"text_input": "two"},
        {"text_input": "one", "stop": ["five"]},
        {"text_input": "four", "chat": True, "max_tokens": 2},
        {"text_input": "one", "temperature": 0.01, "seed": 3, "max_tokens": 3},
        {"text_input": "one", "max_tokens": POSITIONS},
        {"text_input": "one", "temperature": -1.0},
        {"text_input": "zero", "max_tokens": 9, "leaves_after": 2},
        {"text_input": "five", "max_tokens": 1},
    ]
    results = served(model, *requests)
    runner = load_engine(counting, provider="cpu", threads=1)
    for request, responses in zip(requests[:5], results, strict=False):
        options: dict[str, Any] = {name: request[name] for name in ("chat", "stop", "seed") if name in request}
        options |= {"max_new_tokens": request.get("max_tokens"), "temperature": request.get("temperature")}
        assert text_of(responses) == runner.complete([request["text_input"]], **options)[0]
    counts = [response["tokens"] for response in results[0]]
    assert counts[:4] == [1, 2, 3, 4]
    assert set(counts[4:]) <= {4}
    for failed in results[5:7]:
        assert [set(response) for response in failed] == [{"error"}]
    assert [response["tokens"] for response in results[7]] == [1, 2], "the client has gone"
    assert text_of(results[8]) == "six"


@pytest.mark.zoo
def test_an_encoder_decoder_is_served_too(tmp_path: Path) -> None:
    out = run_folder(tmp_path / "pair", has_encoder=True)
    model = export(ServeRequest(out=out, repository=tmp_path / "repository")).model
    assert (model / "1" / ENCODER).is_file()
    assert text_of(served(model, {"text_input": "nine", "max_tokens": 3})[0]) == "one two three"


def test_the_configuration_lists_what_a_client_may_send(counting: Path, model: Path) -> None:
    config = triton_config.load(model / "config.pbtxt")
    assert (config.backend, config.max_batch_size, config.model_transaction_policy.decoupled) == ("python", 0, True)
    assert [entry.name for entry in config.input if not entry.optional] == ["text_input"]
    assert [entry.name for entry in config.output] == ["text_output", "tokens"]
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    assert parameters == {"intra_op_thread_count": "1", "positions": str(POSITIONS)}
    assert not config.model_warmup
    assert "triton" in (model.parent / kserve.FILE_NAME).read_text()
    exported = export(ServeRequest(out=counting, repository=model.parent, name="second", instances=2))
    assert {note.code for note in exported.notes} == {NoteCode.SERVER_REQUIREMENT, NoteCode.STORAGE_URI}
    assert triton_config.load(exported.model / "config.pbtxt").instance_group[0].count == 2


def test_the_engine_is_served_unless_plain_graphs_are_requested(counting: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(counting, out)
    target("ort").build(out / DECODER, engine_of(out / DECODER), provider="cpu")
    for plain, source in ((False, engine_of(out / DECODER)), (True, out / DECODER)):
        exported = export(ServeRequest(out=out, repository=tmp_path / "r", name=f"m{plain}", plain=plain))
        assert (exported.model / "1" / DECODER).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("precision", ["int4w", None])
def test_a_gpu_serves_no_floats_for_rounded_weights(precision: WeightPrecision | None, tmp_path: Path) -> None:
    """The engine writes into the memory of its caches, which is for the CPU; the graph in floats is not."""
    out = run_folder(tmp_path / "out")
    engine = FuseForOrt(in_place=True)(Normalize()(load(exported("gpt2") / DECODER))).model
    assert IN_PLACE in engine.metadata_props
    save(Rounding(precision).apply(engine), engine_of(out / DECODER))
    request = ServeRequest(out=out, repository=tmp_path / "repository", device="gpu")
    with nullcontext() if precision is None else fails_with(ErrorCode.CONTRADICTION, UsageError, field="device"):
        assert model_files.find_files(request).files[DECODER] == out / DECODER
    served = model_files.find_files(request.model_copy(update={"plain": True}))
    assert (served.device, served.files[DECODER]) == ("gpu", out / DECODER)
    engines, unset = engine_of(out / DECODER), request.model_copy(update={"device": None})
    assert model_files.find_files(unset).files[DECODER] == engines
    report = json.loads((out / "report.json").read_text())
    report["session"]["provider"] = "CUDAExecutionProvider"
    (out / "report.json").write_text(json.dumps(report))
    served = model_files.find_files(unset)
    assert (served.device, served.files[DECODER]) == (("cpu", engines) if precision else ("gpu", out / DECODER))


@pytest.mark.parametrize("runtime", ["ort", "openvino"])
def test_engines_of_another_runtime_than_the_server_has_are_named(runtime: str, tmp_path: Path) -> None:
    out = run_folder(tmp_path / "out")
    target(runtime).build_sessions(out, (DECODER,), [(1, 4)], 1)
    request = ServeRequest(out=out, repository=tmp_path / "repository")
    codes = {note.code for note in model_files.find_files(request).notes}
    assert (NoteCode.ENGINE_NOT_SERVED in codes) == (runtime != "ort")
    plain = model_files.find_files(request.model_copy(update={"plain": True}))
    assert NoteCode.ENGINE_NOT_SERVED not in {note.code for note in plain.notes}


def top_level_imports(file: Path) -> Iterator[str]:
    """The modules that a file imports when it is imported."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in GENERATION else node.module


@pytest.mark.parametrize("module", GENERATION)
def test_copied_modules_import_what_a_server_has(module: str) -> None:
    file = Path(str(find_spec(module).origin))  # type: ignore[union-attr]
    imported = {name for name in top_level_imports(file) if name.partition(".")[0] not in sys.stdlib_module_names}
    ours = {name for name in imported if name.startswith(("compressor", "graph_passes"))}
    assert ours <= {*GENERATION, "compressor"}
    assert {name.partition(".")[0] for name in imported - ours} <= set(SERVED)


@pytest.mark.parametrize("fields", [{"max_batch": 4}, {"queue_delay": 5}, {"data": "rows.txt"}])
def test_options_of_batches_are_refused(fields: dict[str, Any], counting: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        export(ServeRequest(out=counting, repository=tmp_path / "r", **fields))
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.CONTRADICTION, *fields)


def test_a_folder_without_a_tokenizer_is_refused(counting: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(counting, out)
    for file in out.glob("tokenizer*"):
        file.unlink()
    with fails_with(ErrorCode.FILE_MISSING, InputError):
        export(ServeRequest(out=out, repository=tmp_path / "r"))
    assert not (tmp_path / "r").exists()


needs_server = pytest.mark.skipif(triton_server.missing() is not None, reason=str(triton_server.missing()))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[triton_server.Server]:
    """A real server, whose models have the packages of this environment behind those of its own Python."""
    packages = f"import sys\nsys.path.append({sysconfig.get_path('platlib')!r})\n"
    for file in model.parent.glob("*/1/model.py"):
        start = "from __future__ import annotations\n"
        file.write_text(file.read_text().replace(start, f"{start}{packages}", 1))
    with triton_server.Server(model.parent) as running:
        yield running


@pytest.mark.triton
@needs_server
def test_a_check_of_the_streaming_model_passes(server: triton_server.Server, model: Path) -> None:
    url = f"http://{server.http}/v2/models/{model.name}/generate_stream"
    lengths = {"prompt_tokens": 3, "new_tokens": 4, "max_slowdown": "100000%", "seconds": 0.1}
    verdict = check(CheckRequest(model=url, baseline=url, expect="baseline", **lengths))
    assert verdict.passed
    assert verdict.first_token is not None


@pytest.mark.triton
@needs_server
def test_a_client_that_leaves_frees_the_instance(server: triton_server.Server, model: Path) -> None:
    import tritonclient.grpc as client

    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open_stream(text: str, tokens: int) -> Any:
        connection = client.InferenceServerClient(server.grpc)
        connection.start_stream(lambda result, error: responses.put((result, error)))
        inputs = [client.InferInput("text_input", [1], "BYTES"), client.InferInput("max_tokens", [1], "INT32")]
        for tensor, value in zip(inputs, ([text.encode()], [tokens]), strict=True):
            tensor.set_data_from_numpy(np.array(value, np.object_ if tensor.datatype() == "BYTES" else np.int32))
        connection.async_stream_infer(model.name, inputs)
        return connection

    leaving = open_stream("zero", 10)
    result, error = responses.get(timeout=60)
    assert error is None
    leaving.stop_stream(cancel_requests=True)
    staying = open_stream("five", 1)
    texts = list[str]()
    while "six" not in "".join(texts):
        result, error = responses.get(timeout=60)
        if error is None:
            texts.append(result.as_numpy("text_output")[0].decode())
    staying.close()
