"""Read and write ONNX files: weights stay on disk until they are written, and nothing is half read or half written."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir

from graph_passes.errors import GraphError

# Weights above this many bytes go into the data file; smaller ones (shapes, scalars) stay with the graph.
_EXTERNAL_BYTES = 1024


@contextlib.contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Where to write a file that shall be there whole or not at all: at the end it is renamed to `path`."""
    place = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield place
        place.replace(path)
    finally:
        place.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read a graph; its external weights are mapped, not read.

    Raises:
        GraphError: the file is missing, truncated or no ONNX graph, or its external data is missing, too short, or lies
            outside the graph's folder.
    """
    path = Path(path)
    if not path.is_file():
        raise GraphError(f"{path}: there is no such ONNX file; give the path of a .onnx file")
    try:
        proto = onnx.load(path, load_external_data=False)
        _check_names(proto.graph, path)
        model = ir.from_proto(proto)
    except (google.protobuf.message.DecodeError, ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        raise GraphError(f"{path}: not a readable ONNX file, maybe truncated; export or copy it again") from error
    if not model.graph.num_nodes() or not model.graph.outputs:
        raise GraphError(f"{path}: the graph has no nodes or no outputs, maybe truncated; export or copy it again")
    folder = path.parent.resolve()
    for graph in model.graphs():
        for value in graph.initializers.values():
            _check_tensor(value.const_value, folder, path)
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR:
                    _check_tensor(attribute.value, folder, path)
    return model


def _check_names(graph: onnx.GraphProto, path: Path) -> None:
    """Every tensor that a node reads has to come from somewhere."""
    known = {value.name for value in (*graph.input, *graph.initializer)}
    known.update(sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        missing = [name for name in node.input if name and name not in known]
        if missing:
            raise GraphError(f"{path}: {node.op_type} reads {missing[0]}, which nothing gives; export or copy it again")
        known.update(node.output)


def data_files(model: ir.Model) -> frozenset[Path]:
    """The files that hold the external weights of a graph that was loaded."""
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return frozenset(Path(tensor.path).resolve() for tensor in tensors if isinstance(tensor, ir.ExternalTensor))


def _check_tensor(tensor: object, folder: Path, path: Path) -> None:
    """Make sure that a tensor has the data that its shape and type speak of."""
    if isinstance(tensor, ir.ExternalTensor):
        _bind(tensor, folder, path)
    elif isinstance(tensor, ir.serde.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING:
        try:
            tensor.numpy()
        except (ValueError, TypeError, AssertionError) as error:
            raise GraphError(f"{path}: {tensor.name} has other data than its shape; export or copy it again") from error


def _bind(tensor: ir.ExternalTensor, folder: Path, path: Path) -> None:
    """Bind a tensor to its folder, after its file is known to hold it."""
    location = Path(str(tensor.location).replace("\\", "/"))
    target = (folder / location).resolve()
    if location.is_absolute() or not Path(os.path.normpath(folder / location)).is_relative_to(folder):
        raise GraphError(
            f"{path}: the data of {tensor.name} lies outside the graph's folder ({location}); move it beside the graph"
        )
    if not target.is_relative_to(folder):
        raise GraphError(
            f"{path}: its data file {location} is a link to a file that lies outside the graph's folder; put the file"
            " itself there"
        )
    if not target.is_file():
        raise GraphError(f"{path}: its data file {location} is missing; copy it beside the graph")
    offset, length = tensor.offset or 0, tensor.length
    needed = offset + (tensor.nbytes if length is None else length)
    if offset < 0 or (length is not None and length != tensor.nbytes) or target.stat().st_size < needed:
        raise GraphError(f"{path}: its data file {location} is too short for {tensor.name}; copy or export it again")
    tensor.base_dir = str(folder)


def save(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a graph as `path` and its weights as `path` + `.data`, each once; written beside and renamed at the end.

    Raises:
        OSError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    path = Path(path)
    data = path.with_name(f"{path.name}.data")
    for place in (path, data):
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(place))
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as atomic_replace:
        written = Path(atomic_replace) / path.name
        ir.save(model, str(written), external_data=data.name, size_threshold_bytes=_EXTERNAL_BYTES)
        with _undisturbed():
            _put(written, path, data)


def _put(written: Path, path: Path, data: Path) -> None:
    """Move a graph and its weights from where they were written to their place, or leave what stood there."""
    made, old = written.with_name(data.name), written.with_name("old")
    with contextlib.suppress(FileNotFoundError):
        data.rename(old)
    try:
        if made.is_file() and made.stat().st_size:
            made.rename(data)
        written.replace(path)
    except BaseException:
        data.unlink(missing_ok=True)
        if old.exists():
            old.rename(data)
        raise


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits: between two renames a graph would stand beside the weights of another."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
