"""Write a Triton model repository from the folder of a run, with real inputs for the served models."""

from compressor.config.request import ServeRequest
from compressor.serving.inputs import real_rows
from compressor.serving.repository import ExportResult, export

__all__ = ["ExportResult", "ServeRequest", "export", "real_rows"]
