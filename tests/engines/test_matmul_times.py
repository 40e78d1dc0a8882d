"""Engines that mix int8 and floats: each width is computed in what is faster, and the numbers are those of the mix."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from compressor.config.sections import EngineConfig
from compressor.engines.build import ShrunkGraph, build_variant
from compressor.engines.choices import DYNAMIC, PORTABLE, Choice
from compressor.engines.matmul_times import MatmulTimes, TimeRatio, matmul_graph
from compressor.engines.prove import Case
from compressor.engines.quantize import quantize_portable
from compressor.progress import RunLog
from compressor.targets import BuildOptions, target
from compressor.targets.base import Widths
from compressor.targets.graph_facts import matmuls_by_widths, mix, quantized_matmuls, weight_matmuls
from compressor.workdir import QUANTIZED_GRAPH
from graph_passes import load
from tests.quantization.graphs import CASES, calibration_rows, needs_nncf
from tests.run.listeners import RecordingListener
from tests.targets.cpu import needs_vnni
from tests.targets.graphs import parsed, pruned

FORMS = [("openvino", PORTABLE), pytest.param("ort", PORTABLE, marks=needs_vnni), ("ort", DYNAMIC)]
SLOW_FORMS = [
    pytest.param("openvino", PORTABLE, marks=pytest.mark.zoo),
    pytest.param("ort", PORTABLE, marks=(needs_vnni, pytest.mark.zoo)),
    ("ort", DYNAMIC),
]
"""The same for what takes seconds."""


def choice_of(name: str, form: str) -> Choice:
    config = EngineConfig(target=name, precision="int8", threads=1, provider="cpu")
    return Choice(config, form, mixes=True)


def ratio_of(slower: Collection[Widths]) -> TimeRatio:
    def ratio(choice: Choice, widths: Widths, rows: Sequence[int], options: BuildOptions) -> float:
        assert all(rows)
        return 2.0 if widths in slower else 0.5

    return ratio


def times_of(slower: Collection[Widths]) -> MatmulTimes:
    return MatmulTimes([case.feeds for case in CASES[:2]], RunLog(RecordingListener()), ratio_of(slower))


FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def portable() -> Path:
    """A graph that is quantized for this processor."""
    return quantize_portable(pruned("bert").shrunk, calibration_rows(), Path(FOLDER.name) / QUANTIZED_GRAPH).path


def source_of(form: str) -> Path:
    return pruned("bert").shrunk if form == DYNAMIC else portable()


def test_products_of_the_same_activations_count_as_one() -> None:
    model = parsed(
        "a = MatMul(x, one) b = Gemm<transB = 1>(x, two, bias) c = MatMul(a, three)",
        "float[n, 3] x",
        "float[n, 5] b, float[n, 4] c",
        "float[3, 2] one, float[5, 3] two, float[2, 4] three, float[5] bias",
    )
    by_widths = matmuls_by_widths(model)
    assert {widths: len(nodes) for widths, nodes in by_widths.items()} == {(3, 7): 2, (2, 4): 1}


@pytest.mark.zoo
@needs_nncf
def test_quantizers_do_not_change_widths() -> None:
    widths = [matmuls_by_widths(load(source_of(form))) for form in (PORTABLE, DYNAMIC)]
    assert widths[0].keys() == widths[1].keys()
    assert len(widths[0]) > 2
    assert sum(map(len, widths[0].values())) == len(weight_matmuls(load(source_of(DYNAMIC))))


@needs_nncf
def test_products_of_any_widths_return_to_floats() -> None:
    every = list(matmuls_by_widths(load(source_of(PORTABLE))))
    count = len(quantized_matmuls(load(source_of(PORTABLE))))
    for number in range(len(every) + 1):
        slower = every[:number]
        mixed = mix(load(source_of(PORTABLE)), slower)
        left = quantized_matmuls(mixed)
        assert all(
            node in left or widths in slower for widths, nodes in matmuls_by_widths(mixed).items() for node in nodes
        )
        assert len(left) + sum(len(matmuls_by_widths(mixed)[widths]) for widths in slower) == count


@needs_nncf
@pytest.mark.parametrize(("name", "form"), SLOW_FORMS)
def test_an_engine_computes_in_floats_what_is_slower_in_int8(name: str, form: str, tmp_path: Path) -> None:
    path, choice = source_of(form), choice_of(name, form)
    every = sorted(matmuls_by_widths(load(path)))
    config, options = times_of(every[:1]).mixed(choice, path, BuildOptions())
    assert config == choice.config
    assert options.float_widths == frozenset(every[:1])
    before = path.read_bytes()
    graph = ShrunkGraph("compressed", pruned("bert").plan, pruned("bert").shrunk, ())
    source = None if form == DYNAMIC else path
    variant = build_variant(graph, config, options, CASES, quantized=source, folder=tmp_path)
    engine = variant.engine
    assert all(proof.holds for proof in variant.proofs)
    assert path.read_bytes() == before, "the graph stays complete"
    assert engine.quantized is not None
    assert engine.quantized.float_widths == tuple(every[:1])
    assert 0 < engine.quantized.executed == engine.quantized.requested
    assert len(engine.quantized.float_in_graph) > 0
    again = target(name).load(engine.path, threads=1)
    assert again.quantized is not None
    assert again.quantized.float_widths == engine.quantized.float_widths


@needs_nncf
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_an_engine_is_in_floats_where_no_width_is_faster_in_int8(name: str, form: str) -> None:
    path, choice = source_of(form), choice_of(name, form)
    every = matmuls_by_widths(load(path))
    config, options = times_of(every.keys()).mixed(choice, path, BuildOptions())
    assert config.precision == options.float_precision == target(name).float_precision
    assert options.float_widths == every.keys()


@needs_nncf
@pytest.mark.parametrize(("name", "form"), SLOW_FORMS)
def test_products_are_timed_alone_in_both_precisions(name: str, form: str) -> None:
    times = MatmulTimes([case.feeds for case in CASES[:1]], RunLog(RecordingListener()))
    path, choice = source_of(form), choice_of(name, form)
    first, second = (times.mixed(choice, path, BuildOptions()) for _ in range(2))
    assert first == second, "each width is timed once"
    assert first[1].float_widths <= matmuls_by_widths(load(path)).keys()


@pytest.mark.parametrize("widths", [(8, 24), (7, 5)])
def test_the_graph_of_a_product_computes_it(widths: Widths, tmp_path: Path) -> None:
    feeds = {"activations": np.random.default_rng(1).standard_normal((3, widths[0]), dtype=np.float32)}
    outputs = []
    for is_quantized in (False, True):
        graph = matmul_graph(widths, np.random.default_rng(0), is_quantized=is_quantized)
        onnx.checker.check_model(graph, full_check=True)
        onnx.save(graph, tmp_path / "product.onnx")
        case = Case(feeds, "three rows")
        outputs.append(target("ort").run_fixed(tmp_path / "product.onnx", case.feeds)["output"])
    assert outputs[0].shape == (3, widths[1])
    np.testing.assert_allclose(outputs[1], outputs[0], atol=0.3)
