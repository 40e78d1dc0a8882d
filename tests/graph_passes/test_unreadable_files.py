"""Graphs that are incomplete or unsafe to read are a `GraphError`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import hypothesis
import onnx
import pytest
from hypothesis import strategies as st

from graph_passes import GraphError, GraphPassError, data_files, find_attention, load, save
from graph_passes.errors import GraphErrorCode
from tests.graph_passes.layers import LAYERS
from tests.graph_passes.saved_graph import model


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
    "location", ["/etc/passwd", "../secret", "a/../../secret", "..\\secret", "link", "linked/secret", "copy"]
)
def test_data_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(10_000))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "copy").hardlink_to(tmp_path / "secret")
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
    assert_refused(saved, GraphErrorCode.FILE_UNREADABLE, tensor="nowhere")


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


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
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
