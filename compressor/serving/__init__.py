"""A Triton model repository from an out folder, and real inputs of what is served."""

from compressor.config.serve import Backend, Device, ServeRequest
from compressor.serving.inputs import Rows, real_rows
from compressor.serving.repository import Exported, export
from compressor.targets.tensor_specs import TensorSpec, inputs_of, outputs_of

__all__ = [
    "Backend",
    "Device",
    "Exported",
    "Rows",
    "ServeRequest",
    "TensorSpec",
    "export",
    "inputs_of",
    "outputs_of",
    "real_rows",
]
