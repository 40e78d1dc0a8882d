"""Write the folder of a model into a Triton repository, atomically."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compressor.config.request import Backend, Device, ServeRequest
from compressor.environment import has_pytorch
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import Note, NoteCode
from compressor.serving import inputs, kserve, model_files, triton_config
from compressor.serving.model_files import ModelFiles
from compressor.targets.tensor_specs import PIXELS
from compressor.workdir import locked, replace_folder

VERSION = "1"
_MAX_ROWS = 1000
"""Maximum number of rows that are read from a data set."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        model: folder of the model.
        service: the KServe YAML for all models of the repository.
        backend, device: the backend that runs the model, and its device.
        max_batch: maximum rows per batch; 0: the server forms no batches.
        warmups: number of requests that the server runs before it is ready.
        notes: notes for the user of the command.
    """

    model: Path
    service: Path
    backend: Backend
    device: Device
    max_batch: int
    warmups: int
    notes: tuple[Note, ...]


def export(request: ServeRequest, service: Callable[..., str] = kserve.service) -> ExportResult:
    """Write a model into a repository, and the KServe service of all its models.

    Args:
        service: returns the YAML of the service, from the arguments of `kserve.service`.

    Raises:
        UsageError: the repository has the model already, or the request contradicts what the run's files permit.
        InputError: a file cannot be read, or the repository cannot be written.
        TargetMissingError: `tritonclient` is not installed.
    """
    _check_output(request)
    files = model_files.find_files(request)
    rows = _warmup_rows(request, files)
    requests = triton_config.warmups(rows.feeds, files.max_batch)
    config = triton_config.to_text(triton_config.model_config(request, files, requests), files.placement.reason)
    with _temporary_folder(request.repository) as temporary:
        model = temporary / "model"
        _write_model(model, files, config, requests)
        served = (path.parent for path in sorted(request.repository.glob(f"*/{triton_config.FILE_NAME}")))
        models = [*(path for path in served if path.name != request.model), model]
        text = service(request.repository, models, request.storage_uri, request.runtime_version)
        service_file = temporary / kserve.FILE_NAME
        service_file.write_text(text, encoding="utf-8")
        _check_output(request)  # a concurrent export may have written the model
        replace_folder(model, request.model_dir, aside=temporary / "old")
        service_file.replace(request.repository / kserve.FILE_NAME)
    _log.debug("wrote %s for the %s backend", request.model_dir, files.backend)
    return ExportResult(
        model=request.model_dir,
        service=request.repository / kserve.FILE_NAME,
        backend=files.backend,
        device=files.device,
        max_batch=files.max_batch,
        warmups=len(requests),
        notes=(*files.notes, *_notes(request, rows, text)),
    )


def _notes(request: ServeRequest, rows: inputs.Rows, service: str) -> Iterator[Note]:
    if rows.random:
        text = f"the warm-up uses random values for {', '.join(rows.random)}, which no row provides"
        yield Note(text=text, code=NoteCode.RANDOM_INPUTS)
    if request.storage_uri is None and kserve.placeholder_uri(request.repository) in service:
        text = f"{request.repository / kserve.FILE_NAME}: storageUri is a placeholder; set it with --storage-uri"
        yield Note(text=text, code=NoteCode.STORAGE_URI)


def _write_model(model: Path, files: ModelFiles, config: str, requests: Sequence[triton_config.Warmup]) -> None:
    for name, file in files.files.items():
        target = model / VERSION / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    (model / triton_config.WARMUP_FOLDER).mkdir()
    for request in requests:
        request.write(model / triton_config.WARMUP_FOLDER)
    (model / triton_config.FILE_NAME).write_text(config, encoding="utf-8")


def _warmup_rows(request: ServeRequest, files: ModelFiles) -> inputs.Rows:
    """The rows of the warm-up: images or texts of the data, or a sentence; a stored row where nothing tokenizes it.

    A model that generates has none: it generates a token when it is loaded.
    """
    shortest, longest = files.lengths
    if files.graph is None:
        return inputs.Rows((), ())
    if request.data is None and not has_pytorch():
        return inputs.completed_rows([{}], files.graph, files.inputs, longest)
    if request.data is not None and any(tensor.name == PIXELS for tensor in files.inputs):
        from compressor.tasks.images import read_pixels

        pixels = read_pixels(request.data, request.out, _MAX_ROWS, requested=request.image_column)
        return inputs.completed_rows([{PIXELS: image[None]} for image in pixels], files.graph, files.inputs, longest)
    texts: Sequence[tuple[str, ...]] = [(inputs.SENTENCE,)]
    if request.data is not None:
        from compressor.model_folder.sentence_texts import read_sentence_texts
        from compressor.tasks.raw_texts import read_texts

        texts = read_texts(request.data, request.text_columns, _MAX_ROWS, read_sentence_texts(request.out))
    return inputs.real_rows(request.out, files.graph, files.inputs, texts, shortest=shortest, longest=longest)


def _check_output(request: ServeRequest) -> None:
    """Make sure that the model's folder may be written."""
    if request.repository.exists() and not request.repository.is_dir():
        text = "not a folder; name another repository (-o)"
        raise InputError.of_file(request.repository, text, ErrorCode.FILE_UNWRITABLE)
    folder = request.model_dir
    if not folder.exists():
        return
    if not request.force:
        text = "the model exists; add --force to replace it, or give another --name"
        raise UsageError.of_file(folder, text, ErrorCode.OUTPUT_EXISTS)
    if not (folder / triton_config.FILE_NAME).is_file():
        text = "not a model of a Triton repository, so --force does not replace it; give another --name"
        raise UsageError.of_file(folder, text, ErrorCode.OUTPUT_EXISTS)


@contextmanager
def _temporary_folder(repository: Path) -> Iterator[Path]:
    """A temporary folder on the file system of the repository, which is locked in the context.

    If possible, the folder is outside the repository, because a server that watches the repository would load an
    incomplete model.
    """
    repository.mkdir(parents=True, exist_ok=True)
    parent = repository.resolve().parent
    outside = os.access(parent, os.W_OK) and parent.stat().st_dev == repository.stat().st_dev
    with (
        locked(repository),
        tempfile.TemporaryDirectory(prefix=".exporting-", dir=parent if outside else repository) as folder,
    ):
        yield Path(folder)
