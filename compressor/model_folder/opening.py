"""Load a model: a model folder, or an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor.config.sections import graph_of
from compressor.model_folder.folder import ModelFolder


def load(path: str | Path, **options: Any) -> ModelFolder:
    """Load a model folder or an ONNX file; nothing is downloaded. A file needs no PyTorch.

    Args:
        path: the folder or the file.
        options: `task`: the task, if the model does not determine it; `inputs`: an .npz file with an array
            `[example, ...]` for each input, if they cannot be generated. For a folder also `allow_pickle`,
            `trust_remote_code` and `pool_in_graph`, for a file `tokenizer`: the folder of the tokenizer.

    Raises:
        InputError: the model cannot be used.
        UsageError: the task does not exist, or transformers has no class of this family for it.
    """
    graph, for_files = graph_of(Path(path)), {name: options.pop(name, None) for name in ("tokenizer", "rows")}
    if graph is None:
        from compressor.model_folder.loading import load_exportable

        return load_exportable(path, **options)
    from compressor.graph.source import load_graph

    return load_graph(Path(path), graph, task=options.get("task"), inputs=options.get("inputs"), **for_files)
