"""Calls of a workload compute what the model computes on the whole text, and caches are counted as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from compressor.config.sections import EngineConfig, MeasureConfig
from compressor.engines.choices import Choice
from compressor.errors import ErrorCode, UsageError
from compressor.generation.deliver import build_plan, count_caches, shrink_whole
from compressor.generation.steps import LOGITS, run_in_steps
from compressor.generation.workload import CachedEngine, Workload, random_texts
from compressor.progress import NullListener, RunLog
from compressor.pruning.costs import keep_counts
from compressor.results import Size
from compressor.run.request_costs import RequestEngines, count_cache
from compressor.run.sizes import check_requests
from compressor.targets import WEIGHT_BITS, WeightPrecision, target
from compressor.targets.onnxruntime.sessions import OrtSessions
from graph_passes import save
from graph_passes.flow.caches import bytes_per_token, cache_names
from graph_passes.passes import ScaleQueries
from tests.generation.exported import MODELS, QUICK, RUNTIMES, exported, whole_graphs
from tests.marks import mostly_zoo

NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.zoo) for name in MODELS]

pytestmark = pytest.mark.usefixtures("shared_exports")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", NAMES)
def test_calls_compute_what_a_whole_text_has(name: str, runtime: str, tmp_path: Path) -> None:
    cached, plan, _ = whole_graphs(name)
    sessions = OrtSessions(exported(name))
    engine = build_plan(cached, plan, target(runtime), Workload(((2, 6),), 8), tmp_path, 1)
    is_decoder_only = not MODELS[name]().config.is_encoder_decoder
    for size, feeds in Workload(((2, 6),), 8).feeds(exported(name), sessions.vocabulary).items():
        logits, whole = engine.run(feeds)[LOGITS], run_in_steps(sessions, feeds)[LOGITS]
        assert logits.shape[1] == (6 if is_decoder_only and size.phase == "prompt" else 1)
        assert whole.shape[1] == {"prompt": 6 * is_decoder_only or 1, "token": 6 * is_decoder_only + 5}[str(size.phase)]
        np.testing.assert_allclose(logits, whole[:, -logits.shape[1] :], atol=1e-4)
        for _ in range(2):
            np.testing.assert_array_equal(engine.run(feeds)[LOGITS], logits)


@pytest.mark.parametrize("field", ["prompt_tokens", "new_tokens"])
def test_sizes_of_requests_are_for_models_that_generate(field: str) -> None:
    config = MeasureConfig(**{field: 8 if field == "new_tokens" else "8"})
    folders: Any = [SimpleNamespace(path=Path("model"), generates=generates) for generates in (True, False)]
    check_requests(config, folders[0])
    check_requests(MeasureConfig(), folders[1])
    with pytest.raises(UsageError) as error:
        check_requests(config, folders[1])
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.CONTRADICTION, field)


def test_a_request_has_a_prompt_and_the_tokens_after_the_first() -> None:
    requests = Workload(((1, 6), (8, 12)), 5).requests
    assert requests == {
        Size(batch, prompt, "request"): {Size(batch, prompt, "prompt"): 1.0, Size(batch, prompt, "token"): 4.0}
        for batch, prompt in ((1, 6), (8, 12))
    }


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.zoo), "llama", "t5"])
def test_the_table_of_caches_has_the_bytes_of_every_plan(name: str, tmp_path: Path) -> None:
    cached, plan, groups = whole_graphs(name)
    table = count_cache(cached, plan, groups, lambda finished, total: None)
    rng = np.random.default_rng(0)
    drawn = [{group.name: int(rng.choice(group.counts)) for group in groups} for _ in range(3)]
    for counts in (*drawn, dict.fromkeys((group.name for group in groups), 0)):
        decoder = shrink_whole(cached, keep_counts(plan, groups, counts))["decoder.onnx"]
        left = bytes_per_token(decoder)
        # Where no layer has heads, a cache may be left to read lengths off.
        assert left == table.cost(counts) or (len(cache_names(decoder)) == 1 and left > table.cost(counts))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", QUICK)
def test_a_plan_without_heads_has_engines_too(name: str, runtime: str, tmp_path: Path) -> None:
    """Cost tables start with the plan that keeps nothing."""
    cached, plan, groups = whole_graphs(name)
    workload = Workload(((1, 4),), 4)
    nothing = keep_counts(plan, groups, dict.fromkeys((group.name for group in groups), 0))
    engine = build_plan(cached, nothing, target(runtime), workload, tmp_path, 1)
    for feeds in workload.feeds(cached.folder, engine.sessions.vocabulary).values():
        assert np.isfinite(engine.run(feeds)[LOGITS]).all()


def test_a_runtime_without_engines_gets_graphs_with_plain_caches(tmp_path: Path) -> None:
    cached, plan, groups = whole_graphs("llama")
    pruned, (decoder,) = keep_counts(plan, groups, {groups[0].name: groups[0].counts[1]}), cached.files
    feeds = random_texts(cached.folder, 90, 2, 6, 9)
    logits = []
    for runtime in ("ort", "trt"):
        graph = shrink_whole(cached, pruned)[decoder]
        target(runtime).prepare_caches(graph)
        assert not ScaleQueries()(graph.clone()).modified or runtime == "ort"
        assert {node.domain for node in graph.graph} == {""}
        save(graph, tmp_path / decoder)
        onnx.checker.check_model(str(tmp_path / decoder), full_check=True)
        logits.append(run_in_steps(OrtSessions(tmp_path, optimized=False), feeds)[LOGITS])
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    written = count_caches(cached, tmp_path, Workload(((1, 6),), 4))
    assert (written.files, written.speeds) == (cached.files, ())
    assert written.compressed_cache < written.dense_cache


@pytest.mark.parametrize("weights", mostly_zoo([None, *WEIGHT_BITS], None, "int4w"))
def test_budgets_bound_the_engine_that_is_delivered_against_floats(
    weights: WeightPrecision | None, tmp_path: Path
) -> None:
    cached, plan, groups = whole_graphs("llama")
    texts: Any = SimpleNamespace(
        plan=plan, label="ort fp32", shapes=(), choice=Choice(EngineConfig()), facts={}, new_folder=lambda: tmp_path
    )
    engines = RequestEngines(texts, cached, Workload(((1, 6),), 4), weights)
    source = engines.source("", groups, [], RunLog(NullListener()))
    assert isinstance(source.dense, CachedEngine)
    pruned = engines.build(keep_counts(plan, groups, {groups[0].name: groups[0].counts[1]}))
    precisions = [engine.sessions.precision for engine in (source.dense, engines.whole, pruned)]
    assert precisions == ["fp32", weights or "fp32", weights or "fp32"]
    assert pruned.sessions.bytes_per_token < engines.whole.sessions.bytes_per_token


def test_times_with_other_threads_are_of_another_host() -> None:
    """Cost tables are stored under it."""
    first, second = (CachedEngine.of(OrtSessions(exported("llama"), threads=threads)) for threads in (1, 2))
    assert first.host != second.host
