"""A model folder as transformers saves it: checked, loaded in full precision, fingerprinted; and inputs to try it."""

from compressor.folder.companions import save_companions
from compressor.folder.inputs import example_inputs
from compressor.folder.loading import ModelFolder, fingerprint, load, load_processor

__all__ = ["ModelFolder", "example_inputs", "fingerprint", "load", "load_processor", "save_companions"]
