"""A Triton repository from an out folder: what stands in it, and, on a real server, what it answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import compressor
import graph_passes
from compressor.errors import InputError, UsageError
from compressor.model_folder import example_inputs
from compressor.model_folder import load as load_folder
from compressor.report import write
from compressor.results import EngineBuild
from compressor.serving import ServeRequest, config, export, inputs_of, kserve, real_rows
from compressor.serving.model_files import Source
from compressor.serving.warmup import warmups
from compressor.targets.onnxruntime.ort_session import describe, open_session, run
from compressor.targets.tensor_specs import TensorSpec
from compressor.targets.tensorrt.metadata import Metadata, digest, graph_digest, papers_of
from compressor.units import find_sites, keep_all
from tests import folders, reports, triton
from tests.command import compress
from tests.engines import parsed
from tests.served import text_model

Cap = pytest.CaptureFixture[str]
_TYPES = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "INT64": "TYPE_INT64",
    "INT32": "TYPE_INT32",
    "BOOL": "TYPE_BOOL",
    "UINT8": "TYPE_UINT8",
}
_GRAPH = parsed("y = Identity (x)", "float[n, 3] x", "float[n, 3] y")
_WORDS = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=9)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    names = draw(st.lists(_WORDS, min_size=1, max_size=4, unique=True))
    dims = st.lists(st.sampled_from([-1, 1, 3, 128]), max_size=3).map(tuple)
    return tuple(
        TensorSpec(name, ir.DataType[draw(st.sampled_from(sorted(_TYPES)))], (-1, *draw(dims))) for name in names
    )


@st.composite
def sources(draw: st.DrawFn) -> Source:
    return Source(
        backend=draw(st.sampled_from(["onnxruntime", "tensorrt", "python"])),
        device=draw(st.sampled_from(["cpu", "gpu"])),
        graph=_GRAPH,
        inputs=draw(tensors()),
        outputs=draw(tensors()),
        max_batch=draw(st.integers(0, 64)),
        lengths=(1, 128),
        files={},
        default=draw(_WORDS),
        by_capability=draw(st.dictionaries(st.sampled_from(["7.5", "8.0", "9.0"]), _WORDS)),
    )


@given(
    sources(),
    _WORDS,
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.lists(st.integers(0, 7), max_size=3, unique=True),
    st.none() | st.integers(1, 64),
)
def test_the_configuration_says_what_was_asked(
    source: Source, name: str, delay: int, instances: int, gpus: list[int], threads: int | None
) -> None:
    asked = ServeRequest(
        Path("out"), Path("r"), name, queue_delay=delay, instances=instances, gpus=tuple(gpus), threads=threads
    )
    rows = [{one.name: np.ones([max(1, dim) for dim in one.dims], one.numpy) for one in source.inputs}]
    warm = warmups(rows, source.max_batch)
    found = config.parse(config.text(config.make(asked, source, warm)))
    first = 1 if source.max_batch else 0
    for given_, read in ((source.inputs, found.input), (source.outputs, found.output)):
        assert [(one.name, one.dims[first:], _TYPES[one.dtype.name]) for one in given_] == [
            (one.name, tuple(one.dims), config.pb.DataType.Name(one.data_type)) for one in read
        ]
    assert (found.name, found.backend, found.max_batch_size) == (name, source.backend, source.max_batch)
    assert found.HasField("dynamic_batching") == (source.max_batch > 1)
    assert found.dynamic_batching.max_queue_delay_microseconds == (delay if source.max_batch > 1 else 0)
    (group,) = found.instance_group
    kind = config.pb.ModelInstanceGroup.Kind.Name(group.kind)
    assert (group.count, list(group.gpus), kind) == (instances, gpus, f"KIND_{source.device.upper()}")
    assert found.parameters["intra_op_thread_count"].string_value == ("" if threads is None else str(threads))
    accelerators = found.optimization.execution_accelerators.gpu_execution_accelerator
    in_tf32 = source.backend == "onnxruntime" and source.device == "gpu"  # unless it is told otherwise
    assert [(one.name, dict(one.parameters)) for one in accelerators] == [("cuda", {"use_tf32": "0"})] * in_tf32
    assert found.default_model_filename == source.default
    assert dict(found.cc_model_filenames) == dict(source.by_capability)
    assert [one.batch_size for one in found.model_warmup] == sorted({1, max(1, source.max_batch)})
    for one in found.model_warmup:
        shapes = {key: tuple(value.dims) for key, value in one.inputs.items()}
        assert shapes == {key: array.shape[first:] for key, array in rows[0].items()}


@given(st.text(min_size=1, max_size=80))
def test_kubernetes_takes_the_name_of_any_model(name: str) -> None:
    found = kserve.service_name(name)
    assert len(f"{found}-predictor-default-00001") <= 63, "room for what KServe and Knative append"
    assert found[0].isalpha()
    assert found[-1].isalnum()
    assert set(found) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An out folder with a graph as small as can be, its weights beside it, and a tokenizer."""
    folder = text_model(tmp_path_factory.mktemp("serving") / "half")
    graph_passes.save(graph_passes.load(folder / "model.onnx"), folder / "engine.onnx")
    write(reports.report(), folder)
    return folder


def test_a_repository_of_onnx(out: Path, tmp_path: Path, capfd: Cap) -> None:
    done = compress(capfd, "export-triton", out, "-o", tmp_path / "repository", "--quiet", "--json")
    assert (done.code, done.err) == (0, "")
    model = tmp_path / "repository" / "half"
    assert done.json["model"] == str(model)
    assert (done.json["backend"], done.json["device"], done.json["max_batch"]) == ("onnxruntime", "cpu", 8)
    graph = model / "1" / "model.onnx" / "model.onnx"
    assert graph.read_bytes() == (out / "engine.onnx").read_bytes()
    assert graph_passes.data_files(graph_passes.load(graph)) == {graph.with_name("engine.onnx.data")}
    found = config.load(model / "config.pbtxt")
    assert [(one.name, list(one.dims)) for one in found.input] == [("input_ids", [-1]), ("attention_mask", [-1])]
    assert [(one.name, list(one.dims)) for one in found.output] == [("logits", [16])]
    written = (tmp_path / "repository" / "kserve.yaml").read_text()
    assert any("storageUri is made up" in note for note in done.json["notes"])
    service = yaml.safe_load(written)
    assert (service["kind"], service["metadata"]["name"]) == ("InferenceService", "repository")
    assert {path.name for path in tmp_path.iterdir()} == {"repository"}


def test_a_service_is_of_all_models_of_a_repository(out: Path, tmp_path: Path) -> None:
    first = export(ServeRequest(out, tmp_path / "r", "a", threads=3, instances=2, storage_uri="s3://there"))
    done = export(ServeRequest(out, tmp_path / "r", "b", device="gpu", gpus=(1,), runtime_version="25.06-py3"))
    assert done.service == first.service
    assert not any("made up" in note for note in done.notes), "it was named before"
    model = yaml.safe_load(done.service.read_text())["spec"]["predictor"]["model"]
    assert (model["storageUri"], model["runtimeVersion"]) == ("s3://there", "25.06-py3")
    assert model["resources"]["limits"] == {"cpu": "6", "memory": "3Gi", "nvidia.com/gpu": "2"}
    own = yaml.safe_load(done.service.read_text())
    own["metadata"]["namespace"] = "mine"
    own["spec"]["predictor"]["model"] |= {
        "ports": [{"name": "h2c", "containerPort": 9000}],
        "args": ["--log-verbose=1"],
    }
    done.service.write_text(yaml.safe_dump(own))
    export(ServeRequest(out, tmp_path / "r", "b", force=True))
    needed = {"cpu": "10", "memory": "3Gi"}
    own["spec"]["predictor"]["model"]["resources"] = {"requests": needed, "limits": needed}
    assert yaml.safe_load(done.service.read_text()) == own, "what was written by hand stays"
    done.service.write_text("odd: [")
    with pytest.raises(InputError, match=r"kserve\.yaml: is no InferenceService .*; move it away"):
        export(ServeRequest(out, tmp_path / "r", "c"))
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"a", "b", "kserve.yaml"}


def test_the_warm_up_is_the_shortest_and_the_longest_row(out: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("the good film\nthe film\none two three four five six\n")
    done = export(ServeRequest(out, tmp_path / "r", data=str(tmp_path / "rows.txt")))
    found = config.load(done.model / "config.pbtxt")
    tokenizer = folders.tokenizer()
    for text, requests in (
        ("the film", found.model_warmup[:2]),
        ("one two three four five six", found.model_warmup[2:]),
    ):
        assert [one.batch_size for one in requests] == [1, 8]
        for one in requests:
            given_ = one.inputs["input_ids"]
            ids = np.frombuffer((done.model / "warmup" / given_.input_data_file).read_bytes(), np.int64)
            assert ids.tolist() == tokenizer(text)["input_ids"]
            assert list(given_.dims) == [len(ids)]


def test_the_plain_graph_and_the_python_backend(out: Path, tmp_path: Path) -> None:
    done = export(ServeRequest(out, tmp_path, "plain", backend="python", plain=True, max_batch=3, threads=2))
    assert (done.model / "1" / "model.onnx" / "model.onnx.data").is_file()
    assert "class TritonPythonModel" in (done.model / "1" / "model.py").read_text()
    assert config.load(done.model / "config.pbtxt").max_batch_size == 3


def test_a_graph_that_fixes_its_batch_is_served_without_batches(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "fixed")
    (tmp_path / "fixed" / "engine.onnx").unlink()
    graph_passes.save(parsed("y = Mul (x, x)", "float[2, 3] x", "float[2, 3] y"), tmp_path / "fixed" / "model.onnx")
    done = export(ServeRequest(tmp_path / "fixed", tmp_path / "r"))
    found = config.load(done.model / "config.pbtxt")
    assert (done.max_batch, found.max_batch_size, list(found.input[0].dims)) == (0, 0, [2, 3])
    assert list(found.model_warmup[0].inputs["x"].dims) == [2, 3]
    assert "the warm-up has random x: no text gives them" in done.notes
    with pytest.raises(UsageError, match=r"--max-batch 4: .* fixes its batch; leave it out"):
        export(ServeRequest(tmp_path / "fixed", tmp_path / "r", "other", max_batch=4))


def test_a_model_is_there_whole_or_as_it_was(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ServeRequest(out, tmp_path / "r", max_batch=2)
    export(asked)
    with pytest.raises(UsageError, match="half: is there already; add --force to replace it, or give another --name"):
        export(asked)
    monkeypatch.setattr(kserve, "service", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        export(replace(asked, force=True, max_batch=5))
    assert config.load(asked.place / "config.pbtxt").max_batch_size == 2
    assert {path.name for path in tmp_path.iterdir()} == {"r"}
    monkeypatch.undo()
    export(replace(asked, force=True, max_batch=5))
    assert config.load(asked.place / "config.pbtxt").max_batch_size == 5
    (asked.place / "config.pbtxt").unlink()
    with pytest.raises(UsageError, match="is no model of a Triton repository, so --force does not replace it"):
        export(replace(asked, force=True))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{tmp}/none", "-o", "{tmp}/r"], 3, "{tmp}/none: no such folder; give the folder that a run wrote"),
        (["{tmp}", "-o", "{tmp}/r"], 3, "{tmp}/report.json: no report there; give the folder of a finished run"),
        (["{out}", "-o", "{out}/plan.x"], 3, "{out}/plan.x: is no folder; name another repository (-o)"),
        (["{out}", "-o", "{tmp}/r", "--name", "a/b"], 2, "a/b: no name for a model"),
        (["{out}", "-o", "{tmp}/r", "--gpus", "0,0"], 2, "--gpus '0,0': give ids of GPUs, each once"),
        (["{out}", "-o", "{tmp}/r", "--gpus", "0", "--device", "cpu"], 2, "--gpus: names GPUs for a model on the CPU"),
        (
            ["{out}", "-o", "{tmp}/r", "--backend", "tensorrt"],
            3,
            "{out}: holds no TensorRT plan; build one on a machine",
        ),
        (["{out}", "-o", "{tmp}/r", "--plan", "{tmp}/no.plan"], 3, "{tmp}/no.plan: no such engine"),
        (["{out}", "-o", "{tmp}/r", "--data", "{tmp}/no.tsv"], 3, "{tmp}/no.tsv: cannot be read"),
        (["{out}"], 2, "Missing option '-o' / '--repository'."),
    ],
)
def test_bad_input_is_one_line(words: list[str], code: int, said: str, out: Path, tmp_path: Path, capfd: Cap) -> None:
    (out / "plan.x").touch()
    places = {"tmp": tmp_path, "out": out}
    done = compress(capfd, "export-triton", "--quiet", *(word.format(**places) for word in words))
    assert (done.code, done.out) == (code, "")
    assert done.error.startswith(said.format(**places))
    assert not list(tmp_path.iterdir())


def plan(folder: Path, name: str, capability: tuple[int, int], most: int, **more: Any) -> Path:
    """A file that passes for a plan, and its metadata."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(repr(capability).encode())
    shapes = ((1, 1), (2, 8), (most, 16))
    facts: dict[str, Any] = {
        "tensorrt": "10.9.0",
        "gpu": f"GPU {capability}",
        "capability": capability,
        "precision": "fp16",
        "profiles": {"input_ids": shapes, "attention_mask": shapes},
        "inputs": {"input_ids": "int32", "attention_mask": "int32"},
        "outputs": {"logits": "float32"},
        "plan": digest(path),
        "hardware_compatible": False,
        "version_compatible": False,
        "attentions": 1,
        "fused": 1,
        "optimization": "",
        "session": {},
        "built": EngineBuild(seconds=1, plan_bytes=1, weight_bytes=1, activation_bytes=1, attention=""),
    }
    papers_of(path).write_text(Metadata(**{**facts, **more}).model_dump_json())
    return path


def test_plans_of_several_gpus_stand_side_by_side(out: Path, tmp_path: Path) -> None:
    built = shutil.copytree(out, tmp_path / "built")
    graph = graph_digest(built / "model.onnx")
    plan(built, "engine.plan", (8, 0), 32, model=graph)
    other = plan(tmp_path / "hopper", "engine.plan", (9, 0), 16, model=graph)
    done = export(ServeRequest(built, tmp_path / "r", "fast", plans=(other,), gpus=(0, 1), storage_uri="s3://models"))
    found = config.load(done.model / "config.pbtxt")
    assert (found.backend, found.platform, found.max_batch_size) == ("tensorrt", "tensorrt_plan", 16)
    assert dict(found.cc_model_filenames) == {"8.0": "model.sm80.plan", "9.0": "model.sm90.plan"}
    assert found.default_model_filename == "model.sm80.plan"
    assert (done.model / "1" / "model.sm90.plan").read_bytes() == other.read_bytes()
    assert (done.model / "1" / "model.sm90.plan.json").is_file()
    assert {config.pb.DataType.Name(one.data_type) for one in found.input} == {"TYPE_INT32"}
    assert done.notes == ("a plan needs a server with TensorRT 10.9.0, by which it was built",)
    service = yaml.safe_load(done.service.read_text())
    needed = {"cpu": "2", "memory": "3Gi", "nvidia.com/gpu": "2"}
    assert service["spec"]["predictor"]["model"]["resources"] == {"requests": needed, "limits": needed}
    (request, _) = found.model_warmup
    ids = np.frombuffer((done.model / "warmup" / request.inputs["input_ids"].input_data_file).read_bytes(), np.int32)
    assert len(ids) == 16  # the sentence is longer than the profile
    with pytest.raises(UsageError, match="--max-batch 17: the plans take 16 rows at most"):
        export(ServeRequest(built, tmp_path / "r", "more", plans=(other,), max_batch=17))


def test_a_server_is_told_that_plans_bring_code(out: Path, tmp_path: Path) -> None:
    built = shutil.copytree(out, tmp_path / "built")
    facts = {"model": graph_digest(built / "model.onnx"), "version_compatible": True, "outputs": {"logits": "int32"}}
    plan(built, "engine.plan", (8, 0), 32, **facts)
    done = export(ServeRequest(built, tmp_path / "r", storage_uri="s3://models"))
    flag = "--backend-config=tensorrt,version-compatible=true"
    assert done.notes == (
        "a plan needs a server with TensorRT 10.9.0, or a later one that runs its version-compatible engines",
        f"the server must be started with {flag}, or it refuses the plan",
    )
    assert yaml.safe_load(done.service.read_text())["spec"]["predictor"]["model"]["args"] == [flag]
    (output,) = config.load(done.model / "config.pbtxt").output
    assert config.pb.DataType.Name(output.data_type) == "TYPE_INT32", "as the plan says, not the graph"


def test_a_repository_is_written_where_nothing_beside_it_can_be(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryDirectory", lambda prefix, dir: pytest.fail(str(dir)))
        with pytest.raises(pytest.fail.Exception, match=f"^{tmp_path / 'r'}$"):
            export(ServeRequest(out, tmp_path / "r"))
    assert export(ServeRequest(out, tmp_path / "r")).model.is_dir()


def test_plans_that_cannot_be_served(out: Path, tmp_path: Path) -> None:
    built = shutil.copytree(out, tmp_path / "built")
    asked = ServeRequest(built, tmp_path / "r")
    path = plan(built, "engine.plan", (8, 0), 32, model="sha256:other")
    with pytest.raises(InputError, match=r"was built from another graph than .*model\.onnx"):
        export(asked)
    plan(built, "engine.plan", (8, 0), 32, model=graph_digest(built / "model.onnx"))
    with pytest.raises(UsageError, match="--device cpu: TensorRT runs on GPUs only"):
        export(replace(asked, device="cpu"))
    again = shutil.copytree(built, tmp_path / "again")
    with pytest.raises(UsageError, match="two are for GPUs of the same compute capability"):
        export(replace(asked, plans=(again / "engine.plan",)))
    for flag, wrong in (("--plain", replace(asked, plain=True)), ("--threads 2", replace(asked, threads=2))):
        with pytest.raises(UsageError, match=f"{flag}: means nothing to a TensorRT plan"):
            export(wrong)
    shapes = {"attention_mask": ((1, 1), (2, 8), (32, 16))}
    differing: tuple[tuple[dict[str, Any], str], ...] = (
        ({"tensorrt": "10.16.1"}, r"engine\.plan: runs with TensorRT 10\.9\.0 and another plan with 10\.16\.1"),
        ({"precision": "fp32"}, "computes in fp32 and another plan in fp16"),
        ({"inputs": {"input_ids": "int64", "attention_mask": "int64"}}, "has other types of inputs or outputs"),
        ({"profiles": {"input_ids": ((1, 17), (2, 18), (32, 20)), **shapes}}, "no number of tokens runs on every plan"),
        ({"profiles": {"input_ids": ((1, 8), (1, 8), (1, 8)), **shapes}}, "has other fixed sizes than another plan"),
    )
    for more, said in differing:
        other = plan(tmp_path / "other", "other.plan", (9, 0), 32, model=graph_digest(built / "model.onnx"), **more)
        with pytest.raises(UsageError, match=said):
            export(replace(asked, plans=(other,)))
    path.write_bytes(b"cut")
    with pytest.raises(InputError, match="is damaged"):
        export(asked)
    assert not (tmp_path / "r").exists()


# On a real server.

_ON_SERVER = [pytest.mark.triton, pytest.mark.skipif(triton.missing() is not None, reason=str(triton.missing()))]


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The out folder of a tiny BERT that lost a head."""
    folder = tmp_path_factory.mktemp("served")
    model = load_folder(folders.save(folders.bert(), folder / "bert"))
    whole = keep_all(find_sites(model.model, example_inputs(model, 2, 8)))
    sites = tuple(replace(site, kept=site.kept[1:], scale=()) for site in whole.sites)
    whole.model_copy(update={"sites": sites}).save(folder / "plan.json")
    sizes = {"seconds": 0.01, "batch": "1,4", "seq": "8", "provider": "cpu"}
    recipe = compressor.Recipe(model=folder / "bert", plan=folder / "plan.json", out=folder / "small", **sizes)
    compressor.compress(recipe)
    return folder / "small"


@pytest.fixture(scope="module")
def server(compressed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.Server]:
    repository = tmp_path_factory.mktemp("triton") / "repository"
    export(ServeRequest(compressed, repository, backend="python", threads=1, instances=2))
    with triton.Server(repository) as running:
        yield running


class Local:
    """The engine in this process, and requests of many sizes with its answers."""

    def __init__(self, out: Path) -> None:
        self.session = open_session(out / "engine.onnx", describe("cpu", 1))
        graph = graph_passes.load(out / "engine.onnx")
        words = [word for word in folders.WORDS if len(word) > 2]
        texts = [(" ".join(words[start : start + count]),) for start in range(5) for count in (1, 4, 9)]
        rows = real_rows(out, graph, inputs_of(graph, out), texts, longest=16).feeds
        self.asked = [
            {name: np.repeat(value, batch, axis=0) for name, value in row.items()} for row in rows for batch in (1, 3)
        ]
        self.answers = [run(self.session, feeds) for feeds in self.asked]


def ask(module: Any, url: str, local: Local, order: np.ndarray) -> None:
    """One client: requests in this order, each answer as the local engine gives it."""
    client = module.InferenceServerClient(url)
    for index in order:
        given_ = []
        for name, value in local.asked[index].items():
            given_.append(module.InferInput(name, value.shape, "INT64"))
            given_[-1].set_data_from_numpy(value)
        found = client.infer("small", given_)
        for name, wanted in local.answers[index].items():
            np.testing.assert_allclose(found.as_numpy(name), wanted, rtol=1e-5, atol=1e-6)
    client.close()


class TestServer:
    pytestmark = _ON_SERVER

    def test_answers_are_the_local_engines_under_load_and_after_a_restart(
        self, server: triton.Server, compressed: Path
    ) -> None:
        import tritonclient.grpc
        import tritonclient.http

        local, rng = Local(compressed), np.random.default_rng(0)
        ways = ((tritonclient.grpc, server.grpc), (tritonclient.http, server.http))
        for restarted in (False, True):
            if restarted:
                server.restart()
            with ThreadPoolExecutor(8) as pool:
                orders = [rng.integers(0, len(local.asked), 30) for _ in range(8)]
                waits = [pool.submit(ask, *ways[index % 2], local, order) for index, order in enumerate(orders)]
                for wait in waits:
                    wait.result(timeout=120)

    def test_the_gate_checks_it(self, server: triton.Server, compressed: Path, capfd: Cap) -> None:
        for url in (f"grpc://{server.grpc}", f"http://{server.http}"):
            asked = (
                "--model",
                "small",
                "--baseline",
                "small:1",
                "--expect",
                compressed,
                "--seq",
                "16",
                "--seconds",
                "0.2",
            )
            done = compress(capfd, "check", "--server", url, *asked, "--max-slowdown", "1000%", "--json", "--quiet")
            assert (done.code, done.json["passed"]) == (0, True), done.err
            assert done.json["host"].startswith("triton 2.51.0 at")
            done = compress(capfd, "check", "--server", url, *asked, "--model", "small:7", "--quiet")
            assert (done.code, "small:7" in done.error) == (10, True)

    def test_what_stands_beside_the_model_is_none(self, server: triton.Server) -> None:
        import tritonclient.grpc

        client = tritonclient.grpc.InferenceServerClient(server.grpc)
        assert [one.name for one in client.get_model_repository_index().models] == ["small"]
        served = client.get_model_config("small").config
        assert (served.max_batch_size, served.dynamic_batching.max_queue_delay_microseconds) == (4, 100)
        assert len(served.model_warmup) == 2
        client.close()

    def test_one_bad_request_spoils_no_other(self, server: triton.Server, compressed: Path) -> None:
        import tritonclient.grpc

        local = Local(compressed)
        client = tritonclient.grpc.InferenceServerClient(server.grpc)
        given_ = []
        for name in local.asked[0]:
            given_.append(tritonclient.grpc.InferInput(name, (1, 40), "INT64"))
            given_[-1].set_data_from_numpy(np.ones((1, 40), np.int64))
        with pytest.raises(tritonclient.utils.InferenceServerException):
            client.infer("small", given_)
        client.close()
        ask(tritonclient.grpc, server.grpc, local, np.arange(len(local.asked)))
