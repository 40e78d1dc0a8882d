"""Load an ONNX file as a model: the file alone, or in the layout of a library, with its configuration and tokenizer.

Nothing here needs PyTorch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import graph_passes
from compressor.config.tasks import ARRAYS, load_own_task
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.graph.config import GraphConfig
from compressor.graph.file import GraphFile
from compressor.graph.program import Program
from compressor.model_folder.companions import COMPANIONS
from compressor.model_folder.feeds import read_example
from compressor.model_folder.files import CONFIG, MODULES, read_config
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.processor import (
    IMAGE_CLASSIFICATION,
    IMAGES,
    PREPROCESSOR,
    load_processor,
    processed_size,
    readable_size,
)
from compressor.model_folder.task_names import requested_task, task_name, task_of_class
from compressor.targets.onnxruntime.ort_session import unoptimized_runner

SENTENCE_SIMILARITY = "sentence-similarity"
_EMBEDS = (SENTENCE_SIMILARITY, "feature-extraction")
"""Tasks of graphs whose outputs are pooled."""
_LONGEST = 2048
"""Longest text that a graph without a configuration is tried with, in tokens."""
_TOKENS = "input_ids"
"""End of the name of an input with one id for each token."""


def load_graph(
    path: Path,
    graph: Path,
    *,
    task: str | None = None,
    tokenizer: Path | None = None,
    inputs: str | Path | None = None,
    rows: Mapping[str, np.ndarray] | None = None,
) -> ModelFolder:
    """Load a graph as a model folder.

    Args:
        path: what the user named: the file or its folder.
        graph: the file.
        task: the task; None: that of the configuration beside the file, else by the form of the outputs.
        tokenizer: folder of the tokenizer; None: that of the file, or the one above it.
        inputs: an .npz file with an array `[example, ...]` for each input; None: inputs are generated.
        rows: the first rows, if rows are arrays named as the inputs, which need no tokenizer.

    Raises:
        InputError: the graph or a file beside it cannot be used.
    """
    folder, own_task = _companion_folder(path, graph), load_own_task(task)
    rows = rows or {}
    if rows and task is not None:
        text = (
            "the rows are arrays, and the outputs of the graph decide the task; omit the option, or give rows of text"
        )
        raise UsageError(f"--task {task}: {text}", code=ErrorCode.CONTRADICTION, field="task", value=task)
    names = {value.name for value in graph_passes.load(graph).graph.inputs}
    reads_images = not rows and IMAGES in names and _TOKENS not in names
    reads_texts = IMAGES not in names and not (folder / MODULES).is_file()  # sentences may be chats
    processor = None if rows else load_processor(tokenizer or folder, images=reads_images, texts=reads_texts)
    sizes = {name: array.shape for name, array in rows.items()}
    if reads_images and processor is not None:
        sizes = {IMAGES: (1, *processed_size(folder, processor))}
    program = Program.of(graph, sizes)
    _require_free_rows(graph, program)
    if not rows and inputs is None:
        _require_processor(graph, folder, program, processor, reads_images=reads_images)
    model_task = task if own_task is None else own_task.task_class.model_task
    config, name = _configuration(folder, program, model_task, rows, processor)
    is_sentence = name in _EMBEDS and (folder / MODULES).is_file()
    model, sentence = GraphFile(program, config), None
    if is_sentence:
        from compressor.graph.sentence import SentenceFile  # which needs PyTorch
        from compressor.model_folder.sentence_modules import read_sentence_modules

        sentence = read_sentence_modules(folder)
        model = SentenceFile(program, config, sentence, folder, processor)
    example = {} if inputs is None else read_example(inputs, model)
    if rows:
        example = {name: rows[name].astype(spec.dtype) for name, spec in model.input_specs.items() if name in rows}
    again = partial(load_graph, path, graph, task=task, tokenizer=tokenizer, inputs=inputs, rows=rows)
    return ModelFolder(
        path=folder,
        model=model,
        processor=processor,
        config=config,
        fingerprint=model.fingerprint(),
        task=SENTENCE_SIMILARITY if is_sentence else name,
        family=config.model_type,
        example=example,
        tokenizer=tokenizer,
        sentence=sentence,
        own_task=own_task,
        image_size=readable_size(folder, model.run, processor) if reads_images and processor is not None else None,
        load_again=again,
    )


def _companion_folder(path: Path, graph: Path) -> Path:
    """The folder of configuration and tokenizer: that of the graph, or the one above it in the layout `onnx/`."""
    if path.is_dir():
        return path
    inner = graph.parent
    above = inner.parent
    has_companions = any(any(inner.glob(pattern)) for pattern in COMPANIONS)
    is_layout = inner.name == "onnx" and any((above / name).is_file() for name in (CONFIG, PREPROCESSOR))
    return above if is_layout and not has_companions else inner


def _require_free_rows(graph: Path, program: Program) -> None:
    """Raise InputError unless a graph takes any number of rows."""
    inputs, _ = program.signature
    fixed = ((name, spec.shape[0]) for name, spec in inputs.items() if spec.shape and spec.shape[0] is not None)
    for name, rows in fixed:
        text = (
            f"{graph}: its input {name} has a fixed batch of {rows}, but proofs and timings need several sizes; export "
            f"the graph with a free first axis of each input"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=graph, input=name)


def _require_processor(graph: Path, folder: Path, program: Program, processor: Any, *, reads_images: bool) -> None:
    """Raise InputError unless inputs of a graph are made from texts by a tokenizer, or from images by a processor."""
    if reads_images and processor is None:
        raise InputError(
            f"{graph}: reads images, but its folder has no {PREPROCESSOR} to make {IMAGES} from them; copy the model's "
            f"file there, or give rows as arrays, a .npz file with an array for each input (--data, or --inputs of a"
            " command without rows)",
            code=ErrorCode.FILE_MISSING,
            path=folder / PREPROCESSOR,
            inputs=tuple(program.inputs),
        )
    if reads_images:
        return
    if _TOKENS not in program.inputs:
        raise InputError(
            f"{graph}: its inputs {', '.join(program.inputs)} are neither texts nor images; give rows as arrays, a .npz"
            " file with an array for each input (--data, or --inputs of a command without rows)",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=graph,
            inputs=tuple(program.inputs),
        )
    if (length := program.signature[0][_TOKENS].shape[1:]) and length[0] is not None:
        raise InputError(
            f"{graph}: its input {_TOKENS} has a fixed length of {length[0]} tokens, but texts have several; export the"
            " graph with a free second axis, or give rows as arrays of this length, a .npz file with an array for each"
            " input (--data)",
            code=ErrorCode.UNSUPPORTED_MODEL,
            path=graph,
            input=_TOKENS,
        )
    if processor is None:
        raise InputError(
            f"{graph}: its folder has no tokenizer; name the folder of the model's tokenizer (--tokenizer), or give"
            " rows as arrays, a .npz file with an array for each input (--data, or --inputs of a command without rows)",
            code=ErrorCode.FILE_MISSING,
            path=graph,
            field="tokenizer",
        )


def _configuration(
    folder: Path, program: Program, task: str | None, rows: Mapping[str, np.ndarray], processor: Any
) -> tuple[GraphConfig, str]:
    if rows:
        tokens = [array.shape[1] for name, array in rows.items() if name.endswith(_TOKENS) and array.ndim == 2]
        known: dict[str, Any] = {"max_position_embeddings": tokens[0]} if tokens else {}
        return GraphConfig(graph=program.digest, **known), ARRAYS
    shown = {"pad_token_id": getattr(processor, "pad_token_id", None) or 0, **program.settings}
    if (folder / CONFIG).is_file():
        entries = read_config(folder)
        config = GraphConfig(graph=program.digest, **{**shown, **entries})
        named = next(filter(None, map(task_of_class, config.architectures or ())), None)
        if task is None and named is not None:
            return config, task_name(named, config)
    else:
        config = GraphConfig(graph=program.digest, **shown)
        if (limit := _token_limit(program)) is not None:
            config.max_position_embeddings = limit
    return config, requested_task(task or _task_by_form(folder, program), config)


def _token_limit(program: Program) -> int | None:
    """The largest number of tokens that a graph of texts runs with, by trying; None: any number up to `_LONGEST`."""
    with tempfile.TemporaryDirectory() as scratch:
        path = program.file
        if program.cached is not None:
            path = Path(scratch) / path.name
            graph_passes.save(program.model, path)
        run = unoptimized_runner(path)
    inputs, _ = program.signature

    def runs(length: int) -> bool:
        feeds = {name: np.ones((1, length), spec.dtype) for name, spec in inputs.items()}
        try:
            run(feeds)
        except InputError:
            return False
        return True

    if any(len(spec.shape) != 2 for spec in inputs.values()) or runs(_LONGEST):
        return None
    low, high = 1, _LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def _task_by_form(folder: Path, program: Program) -> str:
    """The task of a graph of texts or images, by the names and shapes of its outputs."""
    if program.cached is not None:
        return "text-generation"
    names = set(program.outputs)
    if {"start_logits", "end_logits"} <= names:
        return "question-answering"
    rank = len(program.graph.outputs[0].shape or ())
    if rank == 2:
        return "text-classification" if _TOKENS in program.inputs else IMAGE_CLASSIFICATION
    raise InputError(
        f"{folder}: the outputs of the graph ({', '.join(program.outputs)}) do not show its task; name it (--task), or"
        " put the config.json of the model into its folder",
        code=ErrorCode.UNSUPPORTED_MODEL,
        path=folder,
        field="task",
    )
