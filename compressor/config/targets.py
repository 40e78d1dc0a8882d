"""The runtimes to build for, by name. To add one: write its package in `compressor.targets`, add one line here."""

from collections.abc import Mapping

TARGETS: Mapping[str, str] = {
    "ort": "compressor.targets.onnxruntime.target",
    "trt": "compressor.targets.tensorrt.target",
}
"""Target name -> module that defines it. A module is imported when its target is used, not before."""
