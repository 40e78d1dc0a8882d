"""A model's folder in a Triton repository, there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from compressor.config.serve import Backend, Device, ServeRequest
from compressor.errors import InputError, UsageError
from compressor.serving import config, inputs, kserve, model_files, warmup
from compressor.workdir import locked, replace_folder

VERSION = "1"
_ROWS = 1000
"""Rows of a data set at most that are read."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        model: its folder.
        service: KServe's YAML, of all models of the repository.
        backend, device: what runs it, and where.
        max_batch: rows of one batch at most; 0: the server forms no batches.
        warmups: requests that the server runs before it is ready.
        notes: what a reader must know.
    """

    model: Path
    service: Path
    backend: Backend
    device: Device
    max_batch: int
    warmups: int
    notes: tuple[str, ...]


def export(asked: ServeRequest) -> Exported:
    """Write one model into a repository.

    Raises:
        UsageError: the repository has the model already, or something was asked for that `out` cannot give.
        InputError: a file cannot be read, or the repository cannot be written.
        TargetMissingError: `tritonclient` is not installed.
    """
    _check_place(asked)
    found = model_files.find(asked)
    texts = _texts(asked)
    shortest, longest = found.lengths
    rows = inputs.real_rows(asked.out, found.graph, found.inputs, texts, shortest=shortest, longest=longest)
    warm = warmup.warmups(rows.feeds, found.max_batch)
    made = config.make(asked, found, warm)
    asked.repository.mkdir(parents=True, exist_ok=True)
    with (
        locked(asked.repository),
        tempfile.TemporaryDirectory(prefix=".exporting-", dir=_beside(asked.repository)) as folder,
    ):
        model = Path(folder) / "model"
        for name, file in found.files.items():
            target = model / VERSION / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        (model / warmup.FOLDER).mkdir()
        for request in warm:
            request.write(model / warmup.FOLDER)
        (model / config.FILE_NAME).write_text(config.text(made), encoding="utf-8")
        others = (path.parent for path in sorted(asked.repository.glob(f"*/{config.FILE_NAME}")))
        models = [*(path for path in others if path.name != asked.model), model]
        told = kserve.service(asked.repository, models, asked.storage_uri, asked.runtime_version)
        beside = Path(folder) / kserve.FILE_NAME
        beside.write_text(told, encoding="utf-8")
        _check_place(asked)
        replace_folder(model, asked.place, aside=Path(folder) / "old")
        service = asked.repository / kserve.FILE_NAME
        beside.replace(service)
    made_up = kserve.is_placeholder(asked.repository) in told
    unknown = (f"{service}: storageUri is made up; name the cluster's (--storage-uri)",) if made_up else ()
    drawn = (f"the warm-up has random {', '.join(rows.drawn)}: no text gives them",) if rows.drawn else ()
    return Exported(
        model=asked.place,
        service=service,
        backend=found.backend,
        device=found.device,
        max_batch=found.max_batch,
        warmups=len(warm),
        notes=(*found.notes, *drawn, *unknown),
    )


def _texts(asked: ServeRequest) -> list[tuple[str, ...]]:
    """What the model is warmed up with."""
    if asked.data is None:
        return [inputs.SENTENCE]
    from compressor.tasks.raw_texts import read_texts

    return read_texts(asked.data, asked.text_columns, _ROWS)


def _check_place(asked: ServeRequest) -> None:
    if asked.repository.exists() and not asked.repository.is_dir():
        raise InputError(f"{asked.repository}: is no folder; name another repository (-o)")
    if not asked.place.exists():
        return
    if not asked.force:
        raise UsageError(f"{asked.place}: is there already; add --force to replace it, or give another --name")
    if not (asked.place / config.FILE_NAME).is_file():
        raise UsageError(f"{asked.place}: is no model of a Triton repository, so --force does not replace it")


def _beside(repository: Path) -> Path:
    """Where to write first: a server that watches the repository would load what is half there."""
    parent = repository.resolve().parent
    near = os.access(parent, os.W_OK) and parent.stat().st_dev == repository.stat().st_dev
    return parent if near else repository
