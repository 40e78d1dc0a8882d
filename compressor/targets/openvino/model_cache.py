"""OpenVINO's cache of compiled models, in the user's cache: an engine that was loaded before loads faster.

Each engine has a folder, named by a digest of its graph, its settings, the processor and OpenVINO's version. OpenVINO
itself writes the compiled models there, and compiles anew what is damaged or belongs to other weights, another version
or another instruction set. A compiled model from the cache does not report all names of the nodes that its layers
execute, so the layers of the first compilation are stored beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.environment import bfloat16_instructions, int8_instructions, processor
from compressor.file_lock import file_lock
from compressor.targets.openvino import session as sessions
from compressor.targets.openvino.session import Layer
from compressor.targets.user_cache import user_cache
from compressor.workdir import write_json

if TYPE_CHECKING:
    import openvino

_LAYERS = "layers.json"
_MAX_ENGINES = 32
_MAX_BYTES = 4 * 2**30
"""Maximum number and size of the engines that stay in the cache; the ones used last stay."""
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked_folder(path: Path, settings: Mapping[str, Any]) -> Iterator[Path | None]:
    """The cache folder of an engine, locked against other processes that load it.

    Args:
        path: the engine, `.xml`.
        settings: settings of the session.

    Yields:
        The folder; None where the user's cache cannot be written.
    """
    with contextlib.ExitStack() as stack:
        folder = user_cache() / "openvino" / _digest(path, settings)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)  # the time of its last use
            with tempfile.TemporaryFile(dir=folder):  # it can be written
                pass
            stack.enter_context(file_lock(folder))
        except OSError as error:
            logger.debug("%s: compiled models are not cached (%s)", folder, error)
            yield None
            return
        yield folder
    evict_oldest(folder.parent)


def compile_model(
    model: openvino.Model, path: Path, settings: Mapping[str, Any], folder: Path | None
) -> tuple[openvino.CompiledModel, tuple[Layer, ...]]:
    """Compile a graph, or read it from the cache, with the layers that OpenVINO executes.

    Args:
        model: the graph.
        path: its file, for messages.
        settings: settings of the session.
        folder: the cache folder of the engine; None: compile without a cache.

    Raises:
        InputError: OpenVINO cannot compile the graph.
    """
    compiled = sessions.compile_model(model, path, settings, folder)
    if folder is None:
        return compiled, tuple(sessions.executed_layers(compiled))
    is_cached = compiled.get_property("LOADED_FROM_CACHE")
    layers = read_layers(folder) if is_cached else None
    if layers is None:
        first = sessions.compile_model(model, path, settings) if is_cached else compiled
        layers = tuple(sessions.executed_layers(first))
        write_layers(folder, layers)
    return compiled, layers


def _digest(path: Path, settings: Mapping[str, Any]) -> str:
    """Digest of everything but the weights that a compiled model depends on; OpenVINO compares the weights."""
    machine = {"processor": processor(), "instructions": [*int8_instructions(), *bfloat16_instructions()]}
    facts = json.dumps({**machine, **settings}, sort_keys=True)
    return hashlib.sha256(path.read_bytes() + facts.encode()).hexdigest()[:32]


def read_layers(folder: Path) -> tuple[Layer, ...] | None:
    """The stored layers of an engine; None where there are none."""
    try:
        stored = json.loads((folder / _LAYERS).read_text(encoding="utf-8"))
        return tuple(Layer(row["kind"], row["precision"], frozenset(row["nodes"])) for row in stored)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_layers(folder: Path, layers: Iterable[Layer]) -> None:
    """Store the layers of an engine."""
    write_json(folder / _LAYERS, [{**dataclasses.asdict(layer), "nodes": sorted(layer.nodes)} for layer in layers])


def evict_oldest(cache: Path, *, engines: int = _MAX_ENGINES, total: int = _MAX_BYTES) -> None:
    """Remove the engines that were not used for longest, and compiled models of older weights, beyond limits.

    Args:
        cache: folder with one folder for each engine.
        engines: maximum number of engines.
        total: maximum number of bytes.
    """
    with contextlib.suppress(OSError):  # another process may remove the same folders
        folders = sorted(cache.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        size = 0
        for folder in folders[engines:]:
            shutil.rmtree(folder)
        for number, folder in enumerate(folders[:engines]):
            # OpenVINO leaves a file for each set of weights that an engine had.
            files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
            for age, file in enumerate(files):
                size += file.stat().st_size
                if size > total and (number or age):
                    file.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
