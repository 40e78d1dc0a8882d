"""Graphs are saved and loaded without a change; a file is written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from graph_passes import files, load, save, shrink
from graph_passes.files import atomic_replace
from tests.graph_passes.graphs import SIZES, assert_same, content, draw, graph, plan, run
from tests.graph_passes.layers import LAYERS
from tests.graph_passes.saved_graph import model


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


def test_small_weights_in_a_data_file_are_saved_while_their_arrays_are_in_use(tmp_path: Path) -> None:
    weights = {name: np.arange(size, dtype=np.float32) for name, size in (("small", 3), ("large", 900))}
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    nodes = [helper.make_node("Identity", [name], [f"{name}.copy"]) for name in weights]
    outputs = [helper.make_tensor_value_info(f"{name}.copy", 1, array.shape) for name, array in weights.items()]
    whole = helper.make_graph(nodes, "weights", [], outputs, tensors)
    source = helper.make_model(whole, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(source, tmp_path / "a.onnx", save_as_external_data=True, location="a.data", size_threshold=0)
    model = load(tmp_path / "a.onnx")
    arrays = {name: model.graph.initializers[name].const_value.numpy() for name in weights}  # type: ignore[union-attr]
    save(model, tmp_path / "b.onnx")
    assert all(np.array_equal(arrays[name], array) for name, array in weights.items())
    written = load(tmp_path / "b.onnx").graph.initializers
    assert all(np.array_equal(written[name].const_value.numpy(), weights[name]) for name in weights)  # type: ignore[union-attr]


def test_a_constant_in_a_data_file_is_saved_with_the_graph(tmp_path: Path) -> None:
    source = model()
    constant = ir.node("Constant", [], {"value": ir.tensor(np.arange(8, dtype=np.float32))})
    product = next(iter(source.graph))
    product.graph.insert_before(product, constant)  # type: ignore[union-attr]
    source.graph.outputs.append(constant.outputs[0])
    constant.outputs[0].type, constant.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([8])
    (tmp_path / "a").mkdir()
    onnx.save(
        ir.to_proto(source),
        tmp_path / "a" / "model.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
        convert_attribute=True,
    )
    save(load(tmp_path / "a" / "model.onnx"), tmp_path / "copy.onnx")
    shutil.rmtree(tmp_path / "a")
    assert_same(load(tmp_path / "copy.onnx"), source, tolerance=0)


def test_the_operator_set_may_have_its_long_name(tmp_path: Path) -> None:
    layer = LAYERS["separate"].graph()
    proto = ir.to_proto(layer)
    for imported in proto.opset_import:
        imported.domain = imported.domain or "ai.onnx"
    onnx.save(proto, tmp_path / "model.onnx")
    shrunk = shrink(load(tmp_path / "model.onnx"), plan([0, 2]))
    assert_same(shrunk.model, shrink(layer, plan([0, 2])).model, tolerance=0)


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


# -- Files that cannot be written ------------------------------------------------------------------------------------


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


def test_an_interrupt_waits_until_graph_and_weights_are_replaced(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread receives a signal that is blocked in this one. A shell ignores interrupts of background jobs."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    finished = threading.Event()
    threading.Thread(target=finished.wait, args=(10,), daemon=True).start()
    replace_pair, replaced = files._replace_pair, []

    def interrupted(*paths: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        replace_pair(*paths)
        replaced.append(paths)

    monkeypatch.setattr(files, "_replace_pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(load(saved), saved)
    signal.signal(signal.SIGINT, former)
    finished.set()
    assert replaced


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
