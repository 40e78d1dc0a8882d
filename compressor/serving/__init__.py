"""A Triton model repository from an out folder, and real inputs of what is served."""

from compressor.config.serve import Asked, Backend, Device
from compressor.serving.inputs import Rows, real_rows
from compressor.serving.repository import Exported, export
from compressor.targets.tensor_specs import Tensor, inputs_of, outputs_of

__all__ = [
    "Asked",
    "Backend",
    "Device",
    "Exported",
    "Rows",
    "Tensor",
    "export",
    "inputs_of",
    "outputs_of",
    "real_rows",
]
