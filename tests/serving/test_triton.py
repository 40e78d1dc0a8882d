"""A real Triton server responds with the outputs of the local engine: under load, after a restart, and to a check."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graph_passes
from compressor.answers import EMBEDDING, STATES
from compressor.config.request import ServeRequest
from compressor.quantization import quantize_graph
from compressor.report import JSON_NAME
from compressor.serving import export, real_rows
from compressor.serving.model_files import GRAPH
from compressor.targets import BuildOptions, target, target_of
from compressor.targets.tensor_specs import specs_of
from compressor.workdir import QUANTIZED_GRAPH
from tests import folders
from tests.command import compress
from tests.serving import triton_server
from tests.serving.outputs import pruned_folder, report

Cap = pytest.CaptureFixture[str]
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(triton_server.missing() is not None, reason=str(triton_server.missing())),
]


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: a tiny BERT without its first head, built for ONNX Runtime."""
    return pruned_folder(folders.save(folders.bert(), tmp_path_factory.mktemp("run") / "small"))


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: a tiny sentence encoder without its first head, with its pooling in the graph."""
    return pruned_folder(folders.save_sentence_encoder(tmp_path_factory.mktemp("run") / "embedding"))


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: a tiny model that tags tokens, without its first head."""
    return pruned_folder(folders.save(folders.tagger(), tmp_path_factory.mktemp("run") / "tagger"))


@pytest.fixture(scope="module")
def server(
    compressed: Path, embedding: Path, tagger: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[triton_server.Server]:
    repository = tmp_path_factory.mktemp("triton") / "repository"
    for out in (compressed, embedding, tagger):
        export(ServeRequest(out=out, repository=repository, backend="python", threads=1, instances=2))
    with triton_server.Server(repository) as running:
        yield running


class LocalOutputs:
    """Requests of many sizes, with the outputs of the engine in this process."""

    def __init__(self, out: Path, engine: Path) -> None:
        local = target_of(engine).load(engine, threads=1)
        graph = graph_passes.load(out / GRAPH)
        words = [word for word in folders.WORDS if len(word) > 2]
        texts = [(" ".join(words[start : start + count]),) for start in range(5) for count in (1, 4, 9)]
        rows = real_rows(out, graph, specs_of(graph.graph.inputs, out), texts, longest=16).feeds
        self.requests = [
            {name: np.repeat(value, batch, axis=0) for name, value in row.items()} for row in rows for batch in (1, 3)
        ]
        self.outputs = [local.run(feeds) for feeds in self.requests]


@pytest.fixture(scope="module")
def local(compressed: Path) -> LocalOutputs:
    return LocalOutputs(compressed, compressed / "engine.onnx")


def compare_outputs(
    module: Any, url: str, local: LocalOutputs, order: np.ndarray, model: str = "small", tolerance: float = 1e-5
) -> None:
    """Send requests in this order, as one client, and compare every response."""
    client = module.InferenceServerClient(url)
    for index in order:
        inputs = []
        for name, value in local.requests[index].items():
            inputs.append(module.InferInput(name, value.shape, "INT64"))
            inputs[-1].set_data_from_numpy(value)
        response = client.infer(model, inputs)
        for name, expected in local.outputs[index].items():
            np.testing.assert_allclose(response.as_numpy(name), expected, rtol=tolerance, atol=tolerance / 10)
    client.close()


def test_outputs_are_correct_under_load_and_after_a_restart(server: triton_server.Server, local: LocalOutputs) -> None:
    import tritonclient.grpc
    import tritonclient.http

    rng = np.random.default_rng(0)
    clients = ((tritonclient.grpc, server.grpc), (tritonclient.http, server.http))
    for restarted in (False, True):
        if restarted:
            server.restart()
        with ThreadPoolExecutor(8) as pool:
            orders = [rng.integers(0, len(local.requests), 30) for _ in range(8)]
            waits = [
                pool.submit(compare_outputs, *clients[index % 2], local, order) for index, order in enumerate(orders)
            ]
            for wait in waits:
                wait.result(timeout=120)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_check_of_the_server_passes(
    protocol: str, server: triton_server.Server, compressed: Path, capfd: Cap
) -> None:
    url = f"{protocol}://{getattr(server, protocol)}"
    arguments = ("check", "--server", url, "--baseline", "small:1", "--expect", compressed, "--seq", "16", "--quiet")
    limits = ("--seconds", "0.2", "--max-slowdown", "1000%")
    result = compress(capfd, *arguments, *limits, "--model", "small", "--json")
    assert (result.code, result.json["passed"]) == (0, True), result.err
    assert result.json["host"].startswith("triton 2.51.0 at")
    result = compress(capfd, *arguments, "--model", "small:7")
    assert (result.code, result.error_code, result.details["model"]) == (10, "model-not-ready", "small:7")


@pytest.mark.parametrize(
    ("name", "outputs", "rows"),
    [
        ("embedding", (EMBEDDING, STATES), "rows.txt"),
        ("tagger", ("logits",), "rows.conll"),
    ],
)
def test_models_of_other_tasks_are_served_and_checked_with_real_rows(
    name: str,
    outputs: tuple[str, ...],
    rows: str,
    server: triton_server.Server,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capfd: Cap,
) -> None:
    import tritonclient.grpc

    out = request.getfixturevalue(name)
    local = LocalOutputs(out, out / "engine.onnx")
    assert {tuple(row) for row in local.outputs} == {outputs}
    compare_outputs(tritonclient.grpc, server.grpc, local, np.arange(len(local.requests)), name)
    row = "the O\ngood B-FILM\nfilm I-FILM\n\n" if rows.endswith(".conll") else "the good film\n"
    (tmp_path / rows).write_text(row * 16)
    arguments = ("check", "--server", f"grpc://{server.grpc}", "--model", name, "--baseline", f"{name}:1")
    texts = ("--inputs", tmp_path / rows, "--tokenizer", out, "--expect", out, "--seq", "8")
    result = compress(capfd, *arguments, *texts, "--seconds", "0.2", "--max-slowdown", "1000%", "--quiet", "--json")
    assert (result.code, result.json["passed"]) == (0, True), result.err


def test_the_repository_holds_only_the_models(server: triton_server.Server) -> None:
    import tritonclient.grpc

    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    names = {model.name for model in client.get_model_repository_index().models}
    assert names == {"embedding", "small", "tagger"}
    config = client.get_model_config("small").config
    assert (config.max_batch_size, config.dynamic_batching.max_queue_delay_microseconds) == (4, 100)
    assert len(config.model_warmup) == 2
    client.close()


def test_a_bad_request_does_not_affect_others(server: triton_server.Server, local: LocalOutputs) -> None:
    import tritonclient.grpc

    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    inputs = []
    for name in local.requests[0]:
        inputs.append(tritonclient.grpc.InferInput(name, (1, 40), "INT64"))  # more tokens than the model has positions
        inputs[-1].set_data_from_numpy(np.ones((1, 40), np.int64))
    with pytest.raises(tritonclient.utils.InferenceServerException):
        client.infer("small", inputs)
    client.close()
    compare_outputs(tritonclient.grpc, server.grpc, local, np.arange(len(local.requests)))


@pytest.fixture(scope="module")
def in_openvino(compressed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: the same graph in int8, built for OpenVINO with fixed shapes."""
    pytest.importorskip("nncf")
    folder = tmp_path_factory.mktemp("openvino") / "quantized"
    shutil.copytree(compressed, folder)
    (folder / "engine.onnx").unlink()
    rows = LocalOutputs(compressed, compressed / "engine.onnx").requests
    quantize_graph(folder / GRAPH, rows, folder / QUANTIZED_GRAPH)
    options = BuildOptions(shapes=((2, 4), (4, 16)))
    engine = folder / "engine.xml"
    target("openvino").build(folder / QUANTIZED_GRAPH, engine, precision="int8", threads=1, options=options)
    measured = report(sizes=((1, 8), (4, 8)), target="openvino", precision="int8", session={"provider": "CPU"})
    (folder / JSON_NAME).write_text(measured.model_dump_json())
    return folder


def test_an_engine_of_openvino_is_served_at_its_fixed_shapes(in_openvino: Path, tmp_path: Path) -> None:
    import tritonclient.grpc

    exported = export(ServeRequest(out=in_openvino, repository=tmp_path / "repository", threads=1, instances=2))
    assert exported.backend == "python"
    local = LocalOutputs(in_openvino, in_openvino / "engine.xml")
    rng = np.random.default_rng(0)
    with triton_server.Server(tmp_path / "repository") as server, ThreadPoolExecutor(4) as pool:
        orders = [rng.integers(0, len(local.requests), 30) for _ in range(4)]
        compare = functools.partial(compare_outputs, tritonclient.grpc, server.grpc, local)
        for wait in [pool.submit(compare, order, "quantized", 1e-4) for order in orders]:
            wait.result(timeout=120)
