"""A loaded model folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.answers import several_answers
from compressor.config.tasks import OwnTask
from compressor.model_folder.access import ModelAccess, access_of
from compressor.model_folder.processor import ImageSize
from compressor.results import Note
from compressor.targets.example_rows import ExampleRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compressor.model_folder.sentence_modules import SentenceModules


@dataclass(frozen=True)
class ModelFolder:
    """A loaded model folder.

    Attributes:
        path: the folder.
        model: the model of transformers, float32, in evaluation mode; or the graph of a file (`GraphFile`). `access` is
            what a run reads and changes of either, and `network` the model of transformers.
        processor: the tokenizer, or the processor of images or sound; None if the folder has none.
        config: configuration of the model.
        fingerprint: `sha256:...` of weights and configuration, independent of the precision of the file.
        task: `text-classification`, `regression`, `causal-lm`, `question-answering`, or optimum's name of another task.
        family: transformers' model type, e.g. `bert`.
        notes: facts for the reader, e.g. tensors of the folder that the model does not use.
        example: inputs of the model `[example, ...]` by name, which `example_inputs` returns; empty: it generates them.
        sentence: the modules around the encoder of a folder of sentence-transformers; None for other folders.
        own_task: the custom task that reads its rows; None: the task named `task` does.
        image_size: size of the images that the processor of an image classifier returns; None for other models.
        layout: an example of its task, whose special tokens example inputs have; None: those of the tokenizer.
        load_again: loads the folder again, with a model that has not run; None: it was not loaded from files.
        base: the folder of the weights, if `path` holds an adapter for them; None: they are in `path`.
        tokenizer: the folder of the tokenizer of a graph, if it is another than `path`.
        needs_weights: whether an output folder needs a file of the weights: no file of this folder holds them as they
            are loaded, or a library runs them with a head that is copied.
    """

    path: Path
    model: Any
    processor: Any
    config: Any
    fingerprint: str
    task: str
    family: str
    notes: tuple[Note, ...] = ()
    example: Mapping[str, np.ndarray] = field(default_factory=dict)
    sentence: SentenceModules | None = None
    own_task: OwnTask | None = None
    image_size: ImageSize | None = None
    layout: ExampleRows | None = None
    load_again: Callable[[], ModelFolder] | None = None
    base: Path | None = None
    tokenizer: Path | None = None
    needs_weights: bool = False

    @property
    def generates(self) -> bool:
        """Whether the model continues texts, with a cache of keys and values."""
        return self.access.generates

    @property
    def access(self) -> ModelAccess:
        """What a run reads and changes of the model."""
        return access_of(self.model)

    @property
    def network(self) -> PreTrainedModel:
        """The model as a module of PyTorch, for what learns by gradients."""
        return self.access.network

    @property
    def file(self) -> Path | None:
        """The ONNX file that the model was loaded from, of which `path` is the folder; None: it was loaded from it."""
        return self.access.file

    @property
    def source(self) -> Path:
        """The ONNX file that the model was loaded from, else the folder."""
        return self.file or self.path

    @property
    def kind(self) -> str:
        """What `source` is, for messages."""
        return "model folder" if self.file is None else "file"

    @property
    def surroundings(self) -> dict[str, str]:
        """What answers depend on besides weights and configuration, by name; a part of the keys of stored results."""
        pooling = ", ".join(getattr(self.model, "settings", ())) or None
        source = None if self.own_task is None else self.own_task.source
        parts = {"pooling": pooling, "answers": several_answers(self.config), "task_source": source}
        return {name: text for name, text in parts.items() if text is not None}
