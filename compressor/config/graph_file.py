"""The ONNX graph that a path stands for, if it is a model without weights of PyTorch."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import ErrorCode, InputError

SUFFIX = ".onnx"
_LAYOUTS = ("model.onnx", "onnx/model.onnx", "onnx/encoder_model.onnx")
"""Graphs of a folder of optimum, and of one of sentence-transformers or transformers.js."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_config.json")


def graph_of(path: Path) -> Path | None:
    """The graph that a path stands for: a file, or that of a folder without weights of PyTorch; None: it has none.

    Args:
        path: what the user names as the model.

    Raises:
        InputError: a folder has several graphs and none under the name of a layout.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return None
    named = [path / name for name in _LAYOUTS if (path / name).is_file()]
    graphs = named[:1] or sorted(path.glob(f"*{SUFFIX}")) or sorted(path.glob(f"onnx/*{SUFFIX}"))
    if len(graphs) > 1:
        names = ", ".join(str(graph.relative_to(path)) for graph in graphs)
        raise InputError(
            f"{path}: the folder has several graphs and no model.onnx ({names}); name the file",
            code=ErrorCode.FILE_MISSING,
            path=path,
            value=names,
        )
    return graphs[0] if graphs else None
