"""The modules of sentence-transformers that a folder lists."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from compressor.errors import InputError
from compressor.model_folder.files import MODULES, read_json


def module_folders(folder: Path) -> tuple[str, ...]:
    """The paths in a folder of its modules, whichever these are; empty for a folder without modules."""
    paths = (PurePosixPath(path) for _, path in listed_modules(folder))
    return tuple(str(path) for path in paths if path.parts and not is_outside(path))


def is_outside(path: PurePosixPath) -> bool:
    """Whether a path that a model names leaves its folder."""
    return path.is_absolute() or ".." in path.parts


def listed_modules(folder: Path) -> list[tuple[str, str]]:
    """The class and path of each module; empty where the file of modules is missing, damaged or of another program."""
    try:
        modules = read_json(folder / MODULES)
    except InputError:
        return []
    entries = [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return [(str(entry.get("type")).rpartition(".")[2], str(entry.get("path", ""))) for entry in entries]
