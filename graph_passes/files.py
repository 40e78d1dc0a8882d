"""Read and write ONNX files. Weights stay on disk until they are needed, and files are replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir

from graph_passes.errors import GraphError, GraphErrorCode
from graph_passes.interrupts import interrupts_deferred

_logger = logging.getLogger(__name__)

_EXTERNAL_BYTES = 1024
"""Weights above this size go into the data file; smaller ones (shapes, scalars) stay with the graph."""


@contextlib.contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Replace a file atomically.

    Yields:
        A temporary path in the same folder to write to. It is renamed to `path` at the end, or deleted after an error.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all, in UTF-8 and with the line ends of the text."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read a graph. Its external weights are mapped from their file, not read.

    Raises:
        GraphError: the file is missing, truncated or not an ONNX graph, or its external data are missing, too short, or
            outside the graph's folder.
    """
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "there is no such ONNX file"
        message = f"{path}: {problem}; give the path of a .onnx file"
        raise GraphError(message, code=GraphErrorCode.FILE_MISSING, path=path)
    try:
        proto = onnx.load(path, load_external_data=False)
        _check_names(proto.graph, path)
        model = ir.from_proto(proto)
        _name_default_domain(model)
    except (google.protobuf.message.DecodeError, ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _unreadable(path, f"not a readable ONNX file, maybe truncated ({reason:.200})") from error
    if not model.graph.num_nodes() or not model.graph.outputs:
        raise _unreadable(path, "the graph has no nodes or no outputs, maybe truncated")
    folder = path.parent.resolve()
    for graph in model.graphs():
        for value in graph.initializers.values():
            _check_tensor(value.const_value, folder, path)
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR:
                    _check_tensor(attribute.value, folder, path)
    _logger.debug("%s: %d nodes", path, model.graph.num_nodes())
    return model


def _unreadable(path: Path, fault: str, **details: str | None) -> GraphError:
    message = f"{path}: {fault}; export or copy it again"
    return GraphError(message, code=GraphErrorCode.FILE_UNREADABLE, path=path, **details)


def _check_names(graph: onnx.GraphProto, path: Path) -> None:
    """Check that each tensor that a node reads or the graph returns is an input, an initializer or computed before.

    No two inputs have one name, and no two outputs.
    """
    for kind, values in (("inputs", graph.input), ("outputs", graph.output)):
        names = [value.name for value in values]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise _unreadable(path, f"two {kind} are named {repeated}", tensor=repeated)
    defined = {value.name for value in (*graph.input, *graph.initializer)}
    defined.update(sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        undefined = [name for name in node.input if name and name not in defined]
        if undefined:
            raise _unreadable(
                path, f"{node.op_type} reads {undefined[0]}, which no earlier node computes", tensor=undefined[0]
            )
        defined.update(node.output)
    for value in graph.output:
        if value.name not in defined:
            raise _unreadable(path, f"no node computes its output {value.name}", tensor=value.name)


def _name_default_domain(model: ir.Model) -> None:
    """Write the operator set `ai.onnx`, the other name of ONNX's own domain, as that of the domain without a name."""
    for imports in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
        if "ai.onnx" in imports:
            imports.setdefault("", imports.pop("ai.onnx"))


def data_files(model: ir.Model) -> frozenset[Path]:
    """The files that hold the external data of a loaded graph: of initializers and of attributes."""
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    attributes = (attribute for node in model.graph.all_nodes() for attribute in node.attributes.values())
    tensors += [
        attribute.as_tensor()
        for attribute in attributes
        if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref()
    ]
    return frozenset(Path(tensor.path).resolve() for tensor in tensors if isinstance(tensor, ir.ExternalTensor))


def _check_tensor(tensor: object, folder: Path, path: Path) -> None:
    """Check that the data of a tensor have the size that its shape and type require."""
    if isinstance(tensor, ir.ExternalTensor):
        _bind_external(tensor, folder, path)
    elif isinstance(tensor, ir.serde.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING:
        try:
            tensor.numpy()
        except (ValueError, TypeError, AssertionError) as error:
            fault = f"the data of {tensor.name} do not have the size of its shape"
            raise _unreadable(path, fault, tensor=tensor.name) from error


def _bind_external(tensor: ir.ExternalTensor, folder: Path, path: Path) -> None:
    """Check that the file of an external tensor is in the graph's folder and holds all of it, and bind the tensor."""
    location = Path(str(tensor.location).replace("\\", "/"))
    data_path = (folder / location).resolve()
    fault, code = "", GraphErrorCode.UNSAFE_PATH
    if location.is_absolute() or not Path(os.path.normpath(folder / location)).is_relative_to(folder):
        fault = f"the data of {tensor.name} lie outside the graph's folder ({location}); move them into the folder"
    elif not data_path.is_relative_to(folder):
        target = "a file outside the graph's folder"
        fault = f"its data file {location} is a link to {target}; move that file into the folder"
    elif not data_path.is_file():
        fault, code = f"its data file {location} is missing; copy it to the graph", GraphErrorCode.FILE_MISSING
    elif data_path.stat().st_nlink > 1:  # onnx_ir reads none: it may be a file from anywhere
        fault = f"its data file {location} has several names (hard links); replace it by a copy of itself"
    if fault:
        raise GraphError(f"{path}: {fault}", code=code, path=path, tensor=tensor.name, location=location)
    offset, length = tensor.offset or 0, tensor.length
    end = offset + (tensor.nbytes if length is None else length)
    if offset < 0 or (length is not None and length != tensor.nbytes) or data_path.stat().st_size < end:
        raise _unreadable(path, f"its data file {location} is too short for {tensor.name}", tensor=tensor.name)
    tensor.base_dir = str(folder)


def save(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a graph as `path` and its weights as `path` + `.data`. Existing files are replaced at the end.

    Raises:
        OSError: the disk is full, or the folder cannot be written; existing files stay, and no temporary file remains.
    """
    path = Path(path)
    data = path.with_name(f"{path.name}.data")
    for target in (path, data):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(target))
    _read_small(model)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        written = Path(folder) / path.name
        ir.save(model, str(written), external_data=data.name, size_threshold_bytes=_EXTERNAL_BYTES)
        # Between two renames, a graph is beside the weights of another one.
        with interrupts_deferred(signal.SIGINT, signal.SIGTERM):
            _replace_pair(written, path, data)
    _logger.debug("%s: written, %d nodes", path, model.graph.num_nodes())


def _read_small(model: ir.Model) -> None:
    """Read what lies in a data file and is written into the graph: small initializers, and attributes.

    onnx-ir reads such initializers itself, and closes their file, which fails where arrays of them are in use.
    """
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes <= _EXTERNAL_BYTES:
            value.const_value = _in_memory(tensor)
    functions = (node for function in model.functions.values() for node in function.all_nodes())
    for node in (*model.graph.all_nodes(), *functions):
        for name, attribute in list(node.attributes.items()):
            if attribute.type != ir.AttributeType.TENSOR or attribute.is_ref():
                continue
            tensor = attribute.as_tensor()
            if isinstance(tensor, ir.ExternalTensor):
                node.attributes[name] = ir.AttrTensor(name, _in_memory(tensor))


def _in_memory(tensor: ir.ExternalTensor) -> ir.Tensor:
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def _replace_pair(written: Path, path: Path, data: Path) -> None:
    """Move a graph and its data file to their paths; after an error the former files are restored.

    `written` is the graph in a temporary folder, its data file beside it.
    """
    written_data, former_data = written.with_name(data.name), written.with_name("former")
    with contextlib.suppress(FileNotFoundError):
        data.rename(former_data)
    try:
        if written_data.is_file() and written_data.stat().st_size:
            written_data.rename(data)
        written.replace(path)
    except BaseException:
        data.unlink(missing_ok=True)
        if former_data.exists():
            former_data.rename(data)
        raise
