"""The files of a model folder that are neither read nor copied: named, unless they are known to change nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path

from compressor.results import Note, NoteCode

HEADS = ("model_head.*", "config_setfit.json")
"""Files of heads that other libraries run on embeddings: SetFit's, which is often a pickle and is never opened."""
_HARMLESS = (
    ".*",
    "README*",
    "*.md",
    "*.py",
    "*.log",
    "*.png",
    "*.jpg",
    "*.jpeg",
    "*.svg",
    "*.gif",
    "*.pdf",
    "requirements.txt",
    "USE_POLICY*",
    # of training
    "training_args.bin",
    "optimizer.*",
    "scheduler.*",
    "scaler.pt",
    "rng_state*",
    "trainer_state.json",
    "*_results.json",
    "events.out.tfevents*",
    "checkpoint-*/",
    "runs/",
    "logs/",
    "__pycache__/",
    # the same weights in other formats
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "adapter_model.bin",
    "consolidated*",
    "params.json",
    "*.msgpack",
    "*.h5",
    "*.ot",
    "*.gguf",
    "*.tflite",
    "*.onnx",
    "*.onnx.data",
    "*.onnx_data",
    "onnx/",
    "openvino/",
    "coreml/",
    "gguf/",
    # of this package
    "compress.toml",
    "plan.json",
    "plan.safetensors",
    "maps.safetensors",
    "report.*",
    "run-report.*",
    "training.json",
    "engine.*",
    "blocks/",
)
"""Names of files and folders without effect on the model as it is read. Weights that are read are safetensors, of which
those in other formats are copies."""
_LISTED = 5


def notes_on_files(folder: Path, read: Collection[str]) -> Iterator[Note]:
    """Notes on heads that are copied, and on what is neither read nor copied.

    Args:
        folder: the folder.
        read: patterns of the files and folders that are read or copied; those of folders end in `/`.
    """
    heads = sorted(file.name for pattern in HEADS for file in folder.glob(pattern))
    if heads:
        text = f"{folder}: {' and '.join(heads)} are copied; not the engine but the library that wrote them runs them"
        yield Note(text=text, code=NoteCode.FILES_COPIED)
    known = (*read, *HEADS, *_HARMLESS)
    names = (f"{path.name}/" if path.is_dir() else path.name for path in sorted(folder.iterdir()))
    unread = [name for name in names if not any(fnmatch(name, pattern) for pattern in known)]
    unread = [name for name in unread if not name.endswith("/") or any((folder / name).iterdir())]
    if unread:
        more = f" and {len(unread) - _LISTED} more" if len(unread) > _LISTED else ""
        listed = f"{', '.join(unread[:_LISTED])}{more}"
        text = f"{folder}: {listed} are neither read nor copied, because nothing in the folder refers to them"
        yield Note(text=text, code=NoteCode.FILES_UNREAD)
