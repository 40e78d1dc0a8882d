"""Write a Triton model repository from the folder of a run, and make real inputs for served models."""

from compressor.config.serve import Backend, Device, ServeRequest
from compressor.serving.inputs import Rows, real_rows
from compressor.serving.repository import ExportResult, export
from compressor.targets.tensor_specs import TensorSpec, input_specs, output_specs

__all__ = [
    "Backend",
    "Device",
    "ExportResult",
    "Rows",
    "ServeRequest",
    "TensorSpec",
    "export",
    "input_specs",
    "output_specs",
    "real_rows",
]
