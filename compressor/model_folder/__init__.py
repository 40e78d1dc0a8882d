"""A model folder as transformers saves it: checked, loaded in full precision, hashed; and example inputs for it."""

from compressor.model_folder.adapters import source_folders
from compressor.model_folder.companions import save_companions
from compressor.model_folder.example_inputs import example_feeds, example_feeds_by_size, example_inputs, example_rows
from compressor.model_folder.fingerprints import fingerprint
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.loading import fresh_model, load
from compressor.model_folder.processor import load_processor, require_processor
from compressor.models.forward_changes import copy_of

__all__ = [
    "ModelFolder",
    "copy_of",
    "example_feeds",
    "example_feeds_by_size",
    "example_inputs",
    "example_rows",
    "fingerprint",
    "fresh_model",
    "load",
    "load_processor",
    "require_processor",
    "save_companions",
    "source_folders",
]
