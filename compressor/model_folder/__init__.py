"""A model folder as transformers saves it: checked, loaded in full precision, fingerprinted; and inputs to try it."""

from compressor.model_folder.example_inputs import example_inputs
from compressor.model_folder.loading import ModelFolder, fingerprint, load, load_processor
from compressor.model_folder.tokenizer_files import save_companions

__all__ = ["ModelFolder", "example_inputs", "fingerprint", "load", "load_processor", "save_companions"]
