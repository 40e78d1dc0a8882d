"""Differences between versions of TensorRT, on stand-ins for its objects."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

from compressor.errors import ErrorCode, UsageError
from compressor.targets import Precision, target
from compressor.targets.cuda import Device
from compressor.targets.tensorrt import bindings
from compressor.targets.tensorrt.bindings import Features
from tests.targets.tensorrt.machines import H200, NEW, OLD


def test_layers_compute_in_the_types_of_the_graph() -> None:
    kinds: Any = SimpleNamespace(FLOAT="float", HALF="half", INT32="int")
    outputs = [SimpleNamespace(name=name, dtype="float", is_shape_tensor=name == "size") for name in (*"abc", "size")]
    layers = [
        SimpleNamespace(
            type=SimpleNamespace(name="MATRIX_MULTIPLY"),
            num_outputs=1,
            precision=None,
            get_output=lambda index, output=output: output,
        )
        for output in outputs
    ]
    network = SimpleNamespace(num_layers=len(layers), get_layer=layers.__getitem__)
    module: Any = SimpleNamespace(DataType=kinds)
    bindings.set_layer_types(module, network, {"a": ir.DataType.FLOAT16, "b": ir.DataType.INT64})
    assert [layer.precision for layer in layers] == ["half", None, "float", None]


@pytest.mark.parametrize(
    ("number", "version"), [(8600, "8.6.0"), (8601, "8.6.1"), (101601, "10.16.1"), (110400, "11.4.0"), (0, "8.6.1")]
)
def test_the_version_is_read_from_the_library(number: int, version: str) -> None:
    library = SimpleNamespace(getInferLibVersion=lambda: number)
    assert bindings.library_version("8.6.1", lambda name: library) == version


def test_the_version_is_that_of_the_bindings_if_the_library_is_missing() -> None:
    def fail_to_load(name: str) -> Any:
        raise OSError(name)

    assert bindings.library_version("8.6.1", fail_to_load) == "8.6.1"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_precision_that_a_version_lacks_is_refused(precision: Precision) -> None:
    NEW.require(precision, H200)
    with pytest.raises(UsageError) as error:
        OLD.require(precision, H200)
    assert (error.value.code, error.value.details["value"]) == (ErrorCode.UNSUPPORTED, precision)


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)])
def test_fp8_needs_a_gpu_from_ada_on(capability: tuple[int, int], has_fp8: bool) -> None:
    device = Device("a GPU", capability, 1 << 30)
    NEW.require("int8", device)
    with contextlib.nullcontext() if has_fp8 else pytest.raises(UsageError):
        NEW.require("fp8", device)


@pytest.mark.parametrize(("version", "drops"), [(OLD, False), (NEW, True)], ids=["8.6", "10"])
def test_8_6_computes_every_position(version: Features, drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = target("trt")
    monkeypatch.setattr(type(runtime), "missing", lambda self: "a GPU")
    assert runtime.drops_positions, "graphs for another machine are made for newer versions"
    monkeypatch.setattr(type(runtime), "missing", lambda self: None)
    monkeypatch.setattr(type(runtime), "runtime", lambda self: (None, None))
    monkeypatch.setattr(bindings, "features", lambda library: version)
    assert runtime.drops_positions is drops
