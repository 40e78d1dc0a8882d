"""A model folder as transformers saves it: checked, loaded in full precision, hashed; and example inputs for it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.model_folder.adapters import source_folders
    from compressor.model_folder.companions import save_companions
    from compressor.model_folder.examples import example_inputs
    from compressor.model_folder.feeds import example_feeds, example_feeds_by_size, example_rows
    from compressor.model_folder.fingerprints import fingerprint
    from compressor.model_folder.folder import ModelFolder
    from compressor.model_folder.loading import fresh_model
    from compressor.model_folder.opening import load
    from compressor.model_folder.processor import load_processor, require_processor
    from compressor.models.forward_changes import copy_of

__all__ = ["ModelFolder", "copy_of", "example_feeds", "example_feeds_by_size", "example_inputs", "example_rows"]
__all__ += ["fingerprint", "fresh_model", "load", "load_processor", "require_processor", "save_companions"]
__all__ += ["source_folders"]

_MODULES = {
    "compressor.model_folder.adapters": ("source_folders",),
    "compressor.model_folder.companions": ("save_companions",),
    "compressor.model_folder.examples": ("example_inputs",),
    "compressor.model_folder.feeds": ("example_feeds", "example_feeds_by_size", "example_rows"),
    "compressor.model_folder.fingerprints": ("fingerprint",),
    "compressor.model_folder.folder": ("ModelFolder",),
    "compressor.model_folder.loading": ("fresh_model",),
    "compressor.model_folder.opening": ("load",),
    "compressor.model_folder.processor": ("load_processor", "require_processor"),
    "compressor.models.forward_changes": ("copy_of",),
}


def __getattr__(name: str) -> Any:
    # Resolved on first use: tokenizers and rows are read where PyTorch is not installed.
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
