"""Files: a graph that is incomplete or unsafe to read is a `GraphError`; a file is written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import strategies as st

from graph_passes import GraphError, GraphPassError, data_files, find_attention, load, save, shrink
from graph_passes.errors import GraphErrorCode
from graph_passes.files import atomic_replace
from tests.graph_passes.graphs import SIZES, assert_same, content, draw, graph, plan, run
from tests.graph_passes.layers import LAYERS


def model() -> ir.Model:
    """A graph whose two weights are large enough for the data file."""
    return graph("h = MatMul (x, W) g = Relu (h) y = MatMul (g, V)", "float[8, 64] W, float[64, 8] V")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    save(model(), path)
    return path


def edit(path: Path, change: Callable[[onnx.ModelProto], object]) -> None:
    proto = onnx.load(path, load_external_data=False)
    change(proto)
    path.write_bytes(proto.SerializeToString())


def point(key: str, value: str) -> Callable[[onnx.ModelProto], object]:
    """An edit of the location of the data of the first weight."""

    def change(proto: onnx.ModelProto) -> None:
        entries = proto.graph.initializer[0].external_data
        kept = [(entry.key, entry.value) for entry in entries if entry.key != key]
        del entries[:]
        for entry_key, entry_value in [*kept, (key, value)]:
            entries.add(key=entry_key, value=entry_value)

    return change


def test_a_graph_that_is_saved_and_loaded_is_the_same(saved: Path) -> None:
    assert sorted(file.name for file in saved.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert saved.with_name("model.onnx.data").stat().st_size >= 2 * 8 * 64 * 4
    assert_same(load(saved), model(), tolerance=0)


def test_weights_stay_on_disk_until_they_are_read(saved: Path) -> None:
    tensor = load(saved).graph.initializers["W"].const_value
    assert isinstance(tensor, ir.ExternalTensor)


def test_a_weight_that_two_nodes_read_is_written_once(tmp_path: Path) -> None:
    body = "h = MatMul (x, W) g = Relu (h) t = Transpose <perm = [1, 0]> (W) y = MatMul (g, t)"
    save(graph(body, "float[8, 512] W"), tmp_path / "shared.onnx")
    assert (tmp_path / "shared.onnx.data").stat().st_size == 8 * 512 * 4


def test_small_weights_need_no_data_file(tmp_path: Path) -> None:
    (tmp_path / "small.onnx.data").write_bytes(b"of an older graph")
    save(graph("y = Add (x, b)", "float[8] b"), tmp_path / "small.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["small.onnx"]


def test_a_graph_can_be_saved_again_after_it_was_saved(tmp_path: Path) -> None:
    original = model()
    save(original, tmp_path / "a.onnx")
    save(original, tmp_path / "b.onnx")
    (tmp_path / "a.onnx.data").unlink()
    assert_same(load(tmp_path / "b.onnx"), original, tolerance=0)


def test_a_shrunk_graph_may_replace_the_file_that_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    layer = LAYERS["separate"].graph()
    save(layer, path)
    shrunk = shrink(load(path), plan([0, 2]))
    expected = run(shrunk.model, draw(layer, SIZES[0]))
    save(shrunk.model, path)
    np.testing.assert_array_equal(run(load(path), draw(layer, SIZES[0]))[0], expected[0])
    assert content(load(path), "Wq").shape == (8, 6)


def write_half(path: Path) -> None:
    with atomic_replace(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("former")
    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("former", [path])
    with atomic_replace(path) as temporary:
        temporary.write_text("whole")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("whole", [path])


def assert_refused(path: Path, code: GraphErrorCode, **details: object) -> str:
    """Check that loading fails with one line that names the file, and with these details; returns the line."""
    with pytest.raises(GraphError) as error:
        load(path)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    assert (error.value.code, error.value.details) == (code, {"path": path, **details})
    return message


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.onnx", tmp_path):
        assert_refused(path, GraphErrorCode.FILE_MISSING)


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x08\x0a"])
def test_a_file_without_a_graph_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    assert_refused(tmp_path / "model.onnx", GraphErrorCode.FILE_UNREADABLE)


def test_missing_data_are_refused(saved: Path) -> None:
    saved.with_name("model.onnx.data").unlink()
    assert_refused(saved, GraphErrorCode.FILE_MISSING, tensor="W", location=Path("model.onnx.data"))


def test_truncated_data_are_refused(saved: Path) -> None:
    data = saved.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-1])
    assert_refused(saved, GraphErrorCode.FILE_UNREADABLE, tensor="V")


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../secret", "a/../../secret", "..\\secret", "link", "linked/secret"]
)
def test_data_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(10_000))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path)
    path = folder / "model.onnx"
    save(model(), path)
    edit(path, point("location", location))
    expected = Path(location.replace("\\", "/"))
    message = assert_refused(path, GraphErrorCode.UNSAFE_PATH, tensor="W", location=expected)
    assert ("is a link" in message) == location.startswith("link")


@pytest.mark.parametrize(
    ("key", "value", "details"),
    [
        ("offset", "-4", {}),
        ("offset", "999999999999", {"tensor": "W"}),
        ("length", "4", {"tensor": "W"}),
        ("length", "-1", {}),
        ("offset", "x", {}),
    ],
)
def test_data_at_an_invalid_position_are_refused(saved: Path, key: str, value: str, details: dict[str, object]) -> None:
    edit(saved, point(key, value))
    assert_refused(saved, GraphErrorCode.FILE_UNREADABLE, **details)


def constant_in(location: str) -> Callable[[onnx.ModelProto], object]:
    """An edit that adds a `Constant` of 4 numbers in an external file."""

    def change(proto: onnx.ModelProto) -> None:
        tensor = onnx.TensorProto(name="c", dims=[4], data_type=1, data_location="EXTERNAL")
        tensor.external_data.add(key="location", value=location)
        node = proto.graph.node.add(op_type="Constant", output=["c"])
        node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)

    return change


def test_data_of_weights_and_of_constants_are_listed(saved: Path) -> None:
    constants = saved.with_name("constants")
    constants.write_bytes(bytes(16))
    edit(saved, constant_in("constants"))
    assert data_files(load(saved)) == {constants, saved.with_name("model.onnx.data")}


def test_data_of_a_constant_outside_the_folder_are_refused(saved: Path) -> None:
    edit(saved, constant_in("../secret"))
    assert_refused(saved, GraphErrorCode.UNSAFE_PATH, tensor="c", location=Path("../secret"))


def test_an_inline_weight_whose_size_differs_from_its_shape_is_refused(saved: Path) -> None:
    edit(saved, lambda proto: proto.graph.initializer.add(name="b", dims=[3], data_type=1, raw_data=bytes(8)))
    assert_refused(saved, GraphErrorCode.FILE_UNREADABLE, tensor="b")


def test_a_node_that_reads_an_undefined_tensor_is_refused(saved: Path) -> None:
    edit(saved, lambda proto: proto.graph.node.add(op_type="Relu", input=["nowhere"], output=["z"]))
    message = assert_refused(saved, GraphErrorCode.FILE_UNREADABLE, tensor="nowhere")
    assert message == f"{saved}: Relu reads nowhere, which no node computes; export or copy it again"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "model.onnx"
    save(LAYERS["relative bias"].graph(), path)
    return path


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_graph_is_refused(whole: Path, share: float) -> None:
    content = whole.read_bytes()
    path = whole.with_name("cut.onnx")
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(GraphError):
        load(path)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=6)
)
def test_a_damaged_graph_loads_or_is_a_graph_error(whole: Path, flips: list[tuple[float, int]]) -> None:
    content = bytearray(whole.read_bytes())
    for share, bit in flips:
        content[int(share * len(content))] ^= 1 << bit
    path = whole.with_name("flipped.onnx")
    path.write_bytes(content)
    with contextlib.suppress(GraphPassError):
        find_attention(load(path))


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Let no file grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 100, 2000, 4000])
def test_a_full_disk_leaves_no_file(tmp_path: Path, limit: int) -> None:
    with full_disk(limit), pytest.raises(OSError, match="File too large"):
        save(model(), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_former_graph(saved: Path) -> None:
    before = {file.name: file.read_bytes() for file in saved.parent.iterdir()}
    with full_disk(2000), pytest.raises(OSError, match="File too large"):
        save(graph("y = MatMul (x, W)", "float[8, 500] W", outputs="float[B, S, 500] y"), saved)
    assert {file.name: file.read_bytes() for file in saved.parent.iterdir()} == before


def test_an_interrupt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(model(), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(IsADirectoryError):
        save(model(), tmp_path / "model.onnx")
    with pytest.raises(FileNotFoundError):
        save(model(), tmp_path / "none" / "model.onnx")


@pytest.mark.parametrize("failing", ["data", "graph"])
def test_an_interrupted_save_leaves_the_former_graph(
    saved: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in saved.parent.iterdir()}
    real = {"data": Path.rename, "graph": Path.replace}[failing]

    def cut(self: Path, target: Path) -> Path:
        if self.name != saved.name + (".data" if failing == "data" else "") or self.parent == saved.parent:
            return real(self, target)
        raise KeyboardInterrupt

    model = load(saved)
    monkeypatch.setattr(Path, {"data": "rename", "graph": "replace"}[failing], cut)
    with pytest.raises(KeyboardInterrupt):
        save(model, saved)
    assert {path.name: path.read_bytes() for path in saved.parent.iterdir()} == before
