"""Building with the real bindings of every version of TensorRT, its builder and runtime replaced by stand-ins.

A process with the bindings of one version builds everything, see `probe`; the tests read its outcomes.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import ErrorCode
from compressor.quantization import quantize_symmetric
from compressor.targets import TOLERANCE
from compressor.targets.tensorrt.metadata import TimingsState
from tests.targets.cpu import has_vnni
from tests.targets.graphs import pruned
from tests.targets.tensorrt.conftest import RunProbe

VERSIONS = ("8.6", "10.16", "11.4")
QUICK = ("11.4",)
"""The newest version; `make zoo` tests all."""
Outcomes = dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.zoo) for name in VERSIONS],
)
def outcomes(request: pytest.FixtureRequest, run_probe: RunProbe, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of the probe with the bindings of a version."""
    folder = tmp_path_factory.mktemp(request.param)
    return run_probe("probe", request.param, pruned("bert").shrunk, int8_graph(), folder)


@functools.cache
def int8_graph() -> Path:
    """The symmetric quantized graph of a pruned BERT, beside the float one."""
    source = pruned("bert")
    return quantize_symmetric(source.shrunk, [source.inputs], source.shrunk.with_name("symmetric.onnx")).path


def is_old(outcomes: Outcomes) -> bool:
    """Whether the version is 8.6."""
    return str(outcomes["version"]).startswith("8.6")


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 2e-2)])
def test_an_engine_computes_its_graph_in_the_requested_precision(
    precision: str, tolerance: float, outcomes: Outcomes
) -> None:
    old, outcome = is_old(outcomes), outcomes[precision]
    assert outcomes["missing"] is None
    assert outcome["error"] <= tolerance
    assert outcome["types"] == ["float32"]
    assert outcome["network"] == (["EXPLICIT_BATCH"] if old else ["STRONGLY_TYPED"])
    half = ["FP16"] if precision == "fp16" else []
    assert outcome["flags"] == ([*half, "OBEY_PRECISION_CONSTRAINTS"] if old else [])
    assert outcome["layers"] == (["FLOAT"] if old else [None])
    assert set(outcome["inputs"].values()) == {"int32" if old else "int64"}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_engine_is_built_for_the_sizes_and_reports_its_facts(precision: str, outcomes: Outcomes) -> None:
    outcome = outcomes[precision]
    assert outcome["pools"] == {"WORKSPACE": 64 << 20}
    assert outcome["profile"]["input_ids"] == [[1, 1], [2, 8], [4, 16]]
    assert outcome["device_seconds"] == pytest.approx(0.0015)
    assert outcome["attentions"] == [1, 2]
    assert outcome["memory"] is not None


def test_a_loaded_engine_is_the_one_that_was_built(outcomes: Outcomes) -> None:
    assert outcomes["loaded"] == 0


def test_memory_is_unknown_if_there_is_too_little_to_measure_it(outcomes: Outcomes) -> None:
    assert outcomes["without_memory"] is None


def test_shapes_are_set_once_and_a_refused_one_is_named(outcomes: Outcomes) -> None:
    assert outcomes["set_again"] == 0
    refused = outcomes["refused"]
    assert (refused["code"], refused["details"]["tensor"]) == (ErrorCode.TENSOR_MISMATCH, "input_ids")
    assert refused["details"]["shape"] == "(3, 9)"
    assert "setInputShape: odd" in refused["message"]


def test_outputs_have_types_of_the_version(outcomes: Outcomes) -> None:
    assert outcomes["int64"][2] == {"y": "int32" if is_old(outcomes) else "int64"}


def test_a_quantized_graph_decides_its_types_itself(outcomes: Outcomes) -> None:
    flags, layers, _ = outcomes["quantized"]
    assert flags == (["INT8"] if is_old(outcomes) else [])
    assert layers == [None]


def test_a_graph_in_int8_is_strongly_typed_or_has_the_flag_of_the_builder(outcomes: Outcomes) -> None:
    old, outcome = is_old(outcomes), outcomes["int8"]
    assert outcome["network"] == (["EXPLICIT_BATCH"] if old else ["STRONGLY_TYPED"])
    assert outcome["flags"] == (["INT8"] if old else [])
    assert outcome["layers"] == [None], "the types are those of the quantizers"
    assert outcome["error"] <= (1e-2 if has_vnni() else TOLERANCE["int8"]), "sums saturate without VNNI"
    assert set(outcome["inputs"].values()) == {"int32" if old else "int64"}
    assert (outcome["loaded"], outcome["attentions"]) == ("int8", 2)
    assert outcome["quantized"] is None, "the stand-in lists no product"


def test_a_graph_in_floats_is_refused_in_int8(outcomes: Outcomes) -> None:
    refused = outcomes["int8"]["floats"]
    assert (refused["class"], refused["code"]) == ("InputError", ErrorCode.UNSUPPORTED_MODEL)


def test_fp8_needs_a_version_that_has_it(outcomes: Outcomes) -> None:
    assert ("fp8" in outcomes["precisions"]) is not is_old(outcomes)
    if is_old(outcomes):
        assert (outcomes["fp8"]["class"], outcomes["fp8"]["code"]) == ("UsageError", ErrorCode.UNSUPPORTED)
    else:
        assert outcomes["fp8"]["code"] == ErrorCode.UNSUPPORTED_MODEL, "the graph is in floats"


def test_optional_libraries_are_not_used_for_tactics(outcomes: Outcomes) -> None:
    assert outcomes["tactics"] == ["EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"]
    assert bin(outcomes["fp32"]["tactics"]).count("1") == 2


def test_bfloat16_needs_a_version_that_has_it(outcomes: Outcomes) -> None:
    assert ("bf16" in outcomes["precisions"]) is not is_old(outcomes)
    if is_old(outcomes):
        assert (outcomes["bf16"]["class"], outcomes["bf16"]["code"]) == ("UsageError", ErrorCode.UNSUPPORTED)


def test_timings_are_used_again_unless_they_are_damaged_or_refused(outcomes: Outcomes) -> None:
    assert (outcomes["fp32"]["cache"], outcomes["fp16"]["cache"]) == ("", "timings")
    assert outcomes["damaged_cache"] == [TimingsState.DAMAGED, "", TimingsState.REUSED]
    assert outcomes["foreign_cache"] == TimingsState.REFUSED


def test_compatible_engines_are_requested(outcomes: Outcomes) -> None:
    assert "VERSION_COMPATIBLE" in outcomes["compatible_flags"]
    assert outcomes["compatible"]["hardware_compatible"] is True


def test_a_layer_without_a_kernel_in_its_type_computes_in_another_one(outcomes: Outcomes) -> None:
    if is_old(outcomes):
        assert outcomes["preferred"] == [["PREFER_PRECISION_CONSTRAINTS"], "preferred in every layer"]
    else:
        assert outcomes["preferred"]["code"] == ErrorCode.RUNTIME_FAILED
        assert "Could not find any implementation" in outcomes["preferred"]["message"]


def test_a_build_that_runs_out_of_memory_is_repeated_in_less(outcomes: Outcomes) -> None:
    assert outcomes["smaller"] == "8 MiB"
    assert (outcomes["too_large"]["class"], outcomes["too_large"]["code"]) == ("InputError", ErrorCode.OUT_OF_MEMORY)
    assert outcomes["too_large"]["details"]["workspace"] == str(8 << 20)


def test_kernels_that_are_skipped_for_memory_count_as_out_of_memory(outcomes: Outcomes) -> None:
    """8.6 first tries other types, which succeeds here; other versions build again with less memory."""
    assert outcomes["short"] == ("64 MiB" if is_old(outcomes) else "8 MiB")
    assert outcomes["still_short"]["code"] == ErrorCode.OUT_OF_MEMORY, "the repeated warning is received again"


def test_calls_report_no_layer_names_to_a_profiler(outcomes: Outcomes) -> None:
    assert outcomes["nvtx"] == "ProfilingVerbosity.NONE"


def test_messages_of_failures_are_one_line_with_the_log_of_tensorrt(outcomes: Outcomes) -> None:
    assert outcomes["unreadable"]["code"] == ErrorCode.RUNTIME_FAILED
    assert "no importer registered for op: Odd" in outcomes["unreadable"]["message"]
    assert outcomes["damaged"]["code"] == ErrorCode.FILE_UNREADABLE
    assert not any("\n" in outcomes[name]["message"] for name in ("too_large", "unreadable", "damaged"))
