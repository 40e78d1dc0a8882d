"""Decoders with rounded weights compute what these weights say, and keep the metric where it is bounded."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graph_passes
from compressor.config.run import Recipe
from compressor.engines.build import Variant
from compressor.engines.prove import Case
from compressor.errors import ErrorCode, InputError, TargetMissingError, UsageError
from compressor.generation.prove import generation_cases
from compressor.generation.steps import LOGITS, run_in_steps
from compressor.generation.weights import Rounding, WeightTrials, rank_weights, reference_sessions, require_rounded
from compressor.generation.workload import Workload
from compressor.progress import NullListener, RunLog
from compressor.results import NoteCode, ProofStage
from compressor.run.generation import require_weights
from compressor.targets import WEIGHT_BITS, Target, WeightPrecision, target
from compressor.targets.base import Feeds
from compressor.targets.caches import DECODER, ENCODER, Sessions
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.sessions import OrtSessions, engine_of
from compressor.targets.openvino import stateful
from compressor.targets.openvino.session import read_model
from compressor.targets.openvino.stateful import OpenVinoSessions, read_rounded, require_integers
from graph_passes.passes import FoldWeights, QuantizeWeights, ReturnToFloats
from graph_passes.passes.quantize_weights import matrix_of, weights_of
from tests.faults import fails_with
from tests.generation.exported import QUICK, RUNTIMES, exported, inputs
from tests.marks import mostly_zoo
from tests.targets.engines import FakeEngine


def text_of(name: str) -> Feeds:
    feeds = {key: tensor.numpy() for key, tensor in inputs(name).items()}
    return feeds | ({"decoder_input_ids": np.arange(18).reshape(3, 6) + 3} if name == "t5" else {})


@pytest.fixture(scope="module", params=QUICK)
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Feeds]:
    """A folder with graphs and their engines of each runtime in fp32, and a batch of texts."""
    source, folder = exported(request.param), tmp_path_factory.mktemp("graphs")
    for name in (ENCODER, DECODER):
        if (source / name).is_file():
            graph_passes.save(graph_passes.load(source / name), folder / name)
    for runtime in map(target, RUNTIMES):
        runtime.build_sessions(folder, (ENCODER, DECODER), [(1, 8)], 1)
    return folder, text_of(request.param)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Target:
    """A runtime whose engines keep caches."""
    return target(request.param)


def open_rounded(folder: Path, runtime: Target, rounding: Rounding, out: Path) -> Sessions:
    """The engine of a rounded decoder."""
    return runtime.open_sessions(
        folder, provider="cpu", threads=1, decoder=runtime.round_weights(folder, rounding.apply, out)
    )


def matrices(folder: Path) -> dict[str, int]:
    """Name of each matrix of weights -> its columns."""
    model = graph_passes.load(folder / DECODER)
    FoldWeights()(model)
    nodes = [node for node in model.graph if weights_of(node) is not None]
    columns = {str(node.inputs[1].name): matrix_of(node).shape[1] for node in nodes if node.inputs[1] is not None}
    return {name: columns[name] for name in QuantizeWeights(8)(model).report.bits}


def in_floats(model: ir.Model) -> ir.Model:
    """A graph whose products multiply by their rounded weights in floats."""
    return ReturnToFloats([node.name for node in model.graph if node.name])(model).model


def logits_with(folder: Path, feeds: Feeds, rounding: Rounding, scratch: Path) -> np.ndarray:
    """Logits of the decoder with rounded weights in floats, not optimized by the runtime."""
    model = rounding.apply(graph_passes.load(folder / DECODER))
    graph_passes.save(in_floats(model), scratch)
    return run_in_steps(OrtSessions(folder, optimized=False, decoder=scratch), feeds)[LOGITS]


@pytest.mark.parametrize("precision", WEIGHT_BITS)
def test_tokens_are_those_of_the_graph_with_rounded_weights(
    graphs: tuple[Path, Feeds], runtime: Target, precision: WeightPrecision, tmp_path: Path
) -> None:
    folder, feeds = graphs
    rounding = Rounding(precision, tuple(list(matrices(folder))[:2]))
    sessions = open_rounded(folder, runtime, rounding, tmp_path)
    assert Rounding.of(sessions) == rounding
    output = run_in_steps(sessions, feeds)[LOGITS]
    expected = logits_with(folder, feeds, rounding, tmp_path / "rounded.onnx")
    valid = feeds["attention_mask"] != 0 if "decoder_input_ids" not in feeds else np.ones((3, 6), bool)
    errors = np.abs(output - expected)[valid].max()
    assert errors <= 0.1 * np.abs(expected[valid]).max()
    first, second = np.sort(expected[valid], axis=-1)[:, :-3:-1].T
    is_clear = first - second > 2 * errors
    assert np.array_equal(output[valid].argmax(-1)[is_clear], expected[valid].argmax(-1)[is_clear])


def test_products_are_ranked_by_what_rounding_each_alone_does(graphs: tuple[Path, Feeds], tmp_path: Path) -> None:
    folder, feeds = graphs
    feeds = {**feeds, "attention_mask": np.ones_like(feeds["attention_mask"])}  # steps read padding otherwise
    names = list(matrices(folder))
    model = graph_passes.load(folder / DECODER)
    expected = run_in_steps(OrtSessions(folder, optimized=False), feeds)[LOGITS]
    changes = {}
    for name in names:
        alone = QuantizeWeights(4, {kept: None for kept in names if kept != name})(model.clone()).model
        graph_passes.save(in_floats(alone), tmp_path / "alone.onnx")
        sessions = OrtSessions(folder, optimized=False, decoder=tmp_path / "alone.onnx")
        changes[name] = np.square(run_in_steps(sessions, feeds)[LOGITS] - expected).sum()
    ranked = rank_weights(folder, 4, [feeds], tmp_path / "switches.onnx")
    assert sorted(ranked) == sorted(names)
    assert [changes[name] for name in ranked] == pytest.approx(sorted(changes.values(), reverse=True), rel=1e-2)


of_decoder = pytest.mark.parametrize("graphs", mostly_zoo(QUICK, "llama"), indirect=True)
"""Precisions are chosen without regard to the kind of model."""


class Scorer(SimpleNamespace):
    """Scores engines by the change of the logits of one batch, which may be at most `max_drop`."""

    def measure(self, variant: Any, label: str) -> np.ndarray:
        return np.asarray(variant.engine.run(self.feeds)[LOGITS])

    def compare(self, scored: np.ndarray) -> dict[str, Any]:
        loss = float(np.abs(scored - self.expected).mean())
        return {"metric": -loss, "difference": -loss, "holds": self.max_drop is None or loss <= self.max_drop}


@pytest.fixture
def trials(graphs: tuple[Path, Feeds], runtime: Target, tmp_path: Path) -> WeightTrials:
    """Trials on a copy of a folder, with the engines of one runtime."""
    source, feeds = graphs
    for file in (*source.glob("*coder.onnx*"), *runtime.session_files(source)):
        shutil.copy(file, tmp_path)
    (tmp_path / "scratch").mkdir()
    dense: Any = Variant(SimpleNamespace(), FakeEngine(), ())  # type: ignore[arg-type]
    expected = run_in_steps(OrtSessions(source, provider="cpu", threads=1), feeds)[LOGITS]
    scorer: Any = Scorer(dense=dense, feeds=feeds, expected=expected, max_drop=None, seed=0, data=None)
    return WeightTrials(
        folder=tmp_path,
        runtime=runtime,
        texts=generation_cases([Case(feeds, "three texts")]),
        scorer=scorer,
        workload=Workload(((3, 5),), 4),
        threads=1,
        seconds=0.01,
        scratch=tmp_path / "scratch",
        log=RunLog(NullListener()),
    )


def columns_of(sessions: Sessions) -> dict[int, int]:
    """Bits of weights -> the number of columns of the matrices that an engine has with so many bits when it runs."""
    columns: dict[int, int] = Counter()
    if isinstance(sessions, OpenVinoSessions):
        for node in sessions.request.get_compiled_model().get_runtime_model().get_ordered_ops():
            facts = {name: str(value.value) for name, value in node.get_rt_info().items()}
            if facts["layerType"] == "FullyConnected" and facts["runtimePrecision"] in ("u4", "u8"):
                width = node.get_output_partial_shape(0)[-1].get_length()
                columns[int(facts["runtimePrecision"][1:])] += width
        return columns
    for node in graph_passes.load(sessions.path).graph:
        if node.op_type == "MatMulNBits":
            columns[node.attributes.get_int("bits")] += node.attributes.get_int("N")
    return columns


@of_decoder
@pytest.mark.parametrize("precision", WEIGHT_BITS)
def test_a_named_precision_is_delivered_and_its_loss_noted(trials: WeightTrials, precision: WeightPrecision) -> None:
    (row,) = trials.choose([precision])
    assert (row.label, row.chosen, row.failure) == (f"{trials.runtime.name} {precision}", True, "")
    assert [proof.stage for proof in row.proofs] == [ProofStage.CACHED_WEIGHTS]
    delivered = trials._open()
    assert columns_of(delivered) == {WEIGHT_BITS[precision]: sum(matrices(trials.folder).values())}
    assert [note.code for note in trials.log.notes] == [NoteCode.LOSS_UNBOUNDED]
    assert delivered.precision == precision
    assert trials._bytes(delivered.path) == row.file_bytes
    rounded, floats = (
        run_in_steps(sessions, trials.texts[0].feeds)[LOGITS]
        for sessions in (reference_sessions(trials.folder), OrtSessions(trials.folder, optimized=False))
    )
    assert not np.allclose(rounded, floats, rtol=1e-3)


@of_decoder
@pytest.mark.parametrize("runtime", ["ort"], indirect=True)
@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 0), (0.5, None)], ids=["nothing holds", "some products in 8 bits hold"]
)
def test_the_metric_bounds_what_rounding_may_lose(trials: WeightTrials, share: float, expected: int | None) -> None:
    whole = trials._try(Rounding("int4w")).candidate
    scorer: Any = trials.scorer
    scorer.max_drop = share * -whole.metric  # type: ignore[operator]
    scorer.data = SimpleNamespace(task=SimpleNamespace(higher_is_better=True), train=())
    first, second = trials.choose(["int4w"])
    assert not first.holds
    if expected is None:
        assert second.chosen
        assert second.holds
        fewer = trials._try(Rounding("int4w", second.in_float[:-1]))
        assert not fewer.candidate.holds
        columns = matrices(trials.folder)
        finer = sum(columns[name] for name in second.in_float)
        assert columns_of(trials._open()) == {8: finer, 4: sum(columns.values()) - finer}
    else:
        assert first.chosen
        assert second.failure
        assert [note.code for note in trials.log.notes] == [NoteCode.ENGINE_CHOSEN]


@of_decoder
def test_the_fastest_precision_that_holds_is_chosen(trials: WeightTrials) -> None:
    scorer: Any = trials.scorer
    scorer.max_drop = np.inf
    rows = trials.choose([None, *WEIGHT_BITS])
    assert [row.precision for row in rows] == ["fp32", *WEIGHT_BITS]
    (chosen,) = (row for row in rows if row.chosen)
    assert chosen.speed == max(row.speed for row in rows)  # type: ignore[type-var]
    assert trials._open().precision == chosen.precision


@of_decoder
@pytest.mark.parametrize("runtime", ["ort"], indirect=True)
def test_a_decoder_without_weights_to_round_is_refused(trials: WeightTrials) -> None:
    for graph in (trials.folder / DECODER, engine_of(trials.folder / DECODER)):
        if graph.is_file():
            graph_passes.save(QuantizeWeights(8)(graph_passes.load(graph)).model, graph)
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, InputError, precision="int4w"):
        trials.choose(["int4w"])


@pytest.mark.parametrize(
    ("fields", "generates", "named"),
    [
        ({"target": "trt"}, True, "target"),
        ({"provider": "cuda"}, True, "provider"),
        ({}, False, "model"),
        ({"no_cache": True}, True, "no_cache"),
    ],
)
def test_weights_are_rounded_for_engines_with_caches_alone(fields: Any, generates: bool, named: str) -> None:
    folder: Any = SimpleNamespace(generates=generates)
    with fails_with(ErrorCode.CONTRADICTION, UsageError, fields=("precision", named), value="int4w"):
        require_weights(Recipe(model="m", data="d", keep="50%", precision="int4w", **fields), folder)
    require_weights(Recipe(model="m", data="d", keep="50%", precision="fp32", **fields), folder)
    folder = SimpleNamespace(generates=True)
    for name in RUNTIMES:
        require_weights(Recipe(model="m", data="d", keep="50%", precision="int4w", target=name), folder)


def test_a_runtime_that_cannot_multiply_by_rounded_weights_is_refused(
    runtime: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise InputError("no such operator", code=ErrorCode.RUNTIME_FAILED)

    monkeypatch.setattr(ort_session, "unoptimized_runner", fail)
    monkeypatch.setattr(stateful, "read_rounded", fail)
    with fails_with(ErrorCode.UNSUPPORTED, TargetMissingError, field="precision"):
        require_rounded(runtime)


def test_weights_that_openvino_turns_into_floats_are_noticed(graphs: tuple[Path, Feeds], tmp_path: Path) -> None:
    graph = Rounding("int4w").apply(graph_passes.load(graphs[0] / DECODER))
    path, count = tmp_path / DECODER, sum(node.op_type == "MatMulNBits" for node in graph.graph)
    graph_passes.save(graph, path)
    require_integers(read_rounded(path), path, count)
    with fails_with(ErrorCode.UNSUPPORTED, InputError, needed=count):
        require_integers(read_model(path), path, count)  # OpenVINO's own reader folds the weights
