"""A run on a model that generates delivers its graphs with caches: proven, timed, without the heads of the plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers as hf

import compressor
from compressor.config.run import Recipe, definite_fields
from compressor.config.sections import RowsConfig
from compressor.engines.score import forward_of
from compressor.errors import ErrorCode, InputError, MismatchError
from compressor.generation.bench import bench_generation
from compressor.generation.deliver import open_engines
from compressor.generation.export import export_generation
from compressor.generation.workload import Workload
from compressor.model_folder import load as load_folder
from compressor.progress import NullListener, RunLog
from compressor.pruning.allocate import MAX_BUDGET_RATIO
from compressor.results import CACHED_STAGES, NoteCode, Report
from compressor.run.generation import _refusal_noted
from compressor.run.rebuild import rebuild, whole_engines
from compressor.run.run_context import RunContext
from compressor.run.steps import within
from compressor.targets import cached_target, target
from compressor.targets.caches import DECODER
from compressor.tasks import open_data, statistics
from compressor.units import gated
from graph_passes import GraphPassError, Plan, load, save
from graph_passes.flow.caches import cache_names
from tests import folders
from tests.generation.exported import RUNTIMES
from tests.run.listeners import RecordingListener

SHORT: dict[str, Any] = {
    "batch": "1",
    "seq": "8",
    "prompt_tokens": "6",
    "new_tokens": 4,
    "seconds": 0.01,
    "max_length": 8,
    "threads": 1,
}


def write_rows(folder: Path) -> Path:
    """Text for a language model."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(folders.WORDS, 8)) for _ in range(60)]
    rows = folder / "rows.txt"
    rows.write_text("\n".join(lines))
    return rows


@pytest.fixture(scope="module", params=RUNTIMES)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_exports: None
) -> tuple[Path, Report]:
    """The folder of a run under a budget, and its report."""
    folder = tmp_path_factory.mktemp("generation")
    torch.manual_seed(0)
    model = folders.save(folders.gpt2(), folder / "model")
    out = folder / "out"
    recipe = Recipe(model=model, data=str(write_rows(folder)), cache="50%", out=out, target=request.param, **SHORT)
    return out, compressor.compress(recipe)


def test_graphs_with_caches_are_proven_and_timed(finished: tuple[Path, Report]) -> None:
    out, report = finished
    assert report.generation is not None
    assert report.generation.files == (DECODER,)
    assert [row.phase for row in report.generation.speeds] == ["prompt", "token", "request"]
    stages = [(proof.variant, proof.stage) for proof in report.proofs if proof.stage in CACHED_STAGES]
    proven = [("dense", CACHED_STAGES[0]), *(("compressed", stage) for stage in CACHED_STAGES[:3])]
    assert stages == [*proven, ("dense", CACHED_STAGES[2])]
    assert all(proof.holds for proof in report.proofs)
    assert cached_target(out).name == report.target
    assert bool(target(report.target).session_files(out))
    heads = sum(len(site.kept) for site in report.plan.sites)
    assert report.generation.compressed_cache == 2 * 4 * 8 * heads
    assert report.generation.compressed_cache <= report.generation.dense_cache / 2
    assert [(row.unit, row.met) for row in report.budget] == [("cache", True)]
    assert report.generation.dense_cache == 2 * 4 * 8 * report.plan.heads
    assert len(cache_names(load(out / DECODER))) == 2 * sum(bool(site.kept) for site in report.plan.sites)


def test_the_metric_is_that_of_the_engines_with_caches(finished: tuple[Path, Report]) -> None:
    out, report = finished
    assert report.generation is not None
    assert report.generation.is_scored
    (score,) = report.scores
    data = open_data(RowsConfig(data=report.recipe["data"], max_length=SHORT["max_length"]), load_folder(out))
    engine: Any = SimpleNamespace(engine=open_engines(cached_target(out), out, 1))
    assert data.task.score(statistics(data.task, data.test, forward_of(engine, data.task))) == score.compressed


def test_generated_tokens_are_those_of_the_gated_model(finished: tuple[Path, Report]) -> None:
    out, report = finished
    model = hf.AutoModelForCausalLM.from_pretrained(out).eval()
    prompt = torch.tensor([[7, 9, 11], [0, 0, 5]])
    batch = {"input_ids": prompt, "attention_mask": (prompt != 0).long()}
    with gated(model, report.plan, attention="eager"), torch.no_grad():
        expected = model.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=0)
    tokens = compressor.load_engine(out).generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, expected)


def test_a_build_for_another_runtime_builds_its_engines_with_caches(
    finished: tuple[Path, Report], tmp_path: Path
) -> None:
    out, before = finished
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    runtime = next(name for name in RUNTIMES if name != before.target)
    report = rebuild(copy, {"target": runtime, "seconds": 0.01, "threads": 1}, NullListener())
    assert cached_target(copy).name == runtime
    assert not target(before.target).session_files(copy)
    proven = [proof.stage for proof in report.proofs if proof.stage in CACHED_STAGES]
    assert proven == [CACHED_STAGES[0], *CACHED_STAGES[:3]]
    assert report.generation is not None
    assert (report.generation.is_scored, report.generation.speeds) == (False, ())
    batch = {"input_ids": torch.tensor([[7, 9, 11]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    tokens = [
        compressor.load_engine(each).generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=0)
        for each in (out, copy)
    ]
    assert torch.equal(*tokens)


@pytest.mark.usefixtures("shared_exports")
def test_weights_of_few_bits_are_delivered_beside_an_engine_of_whole_texts_in_floats(tmp_path: Path) -> None:
    model = folders.save(folders.gpt2(), tmp_path / "model")
    out = tmp_path / "out"
    recipe = Recipe(
        model=model, data=str(write_rows(tmp_path)), macs="60%", out=out, precision="int4w", max_drop=1e3, **SHORT
    )
    report = compressor.compress(recipe)
    assert report.generation is not None
    (row,) = report.generation.candidates
    assert (row.label, row.chosen, row.holds) == ("ort int4w", True, True)
    assert row.metric is not None
    assert [score.compressed for score in report.scores if score.split == "eval"] == [row.metric]
    assert (report.generation.precision, report.precision, report.delivered) == ("int4w", "fp32", "ort fp32")
    stages = [proof.stage for proof in report.proofs if proof.variant == "compressed"]
    assert [stage for stage in stages if stage in CACHED_STAGES[2:]] == [*CACHED_STAGES[2:]]
    operators = [[node.op_type for node in load(out / name).graph] for name in ("decoder.engine.onnx", "engine.onnx")]
    assert ["MatMulNBits" in each for each in operators] == [True, False]
    assert definite_fields(report)["precision"] == "fp32"
    batch = {"input_ids": torch.tensor([[7, 9, 11]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    tokens = compressor.load_engine(out).generate(**batch, max_new_tokens=4, min_new_tokens=4, pad_token_id=0)
    assert tokens.shape == (1, 7)
    (timed,) = bench_generation([out], Workload(((1, 4),), 4), threads=1, seconds=0.01, listener=NullListener())
    assert timed.precision == "int4w"
    rebuilt = rebuild(out, {"target": "openvino", "seconds": 0.01, "threads": 1}, NullListener())
    assert cached_target(out).open_sessions(out, threads=1).precision == "int4w"
    assert [proof.stage for proof in rebuilt.proofs if proof.stage in CACHED_STAGES[2:]] == [*CACHED_STAGES[2:]]


def with_recipe(out: Path, **fields: str) -> Path:
    """A folder whose report has other fields of the recipe."""
    report = json.loads((out / "report.json").read_text())
    report["recipe"] |= fields
    (out / "report.json").write_text(json.dumps(report))
    return out


def test_the_model_of_a_run_is_timed_beside_its_engines(finished: tuple[Path, Report]) -> None:
    out, _ = finished
    workload, listener = Workload(((1, 4),), 4), NullListener()
    with whole_engines(out, workload, 1, listener) as dense:
        assert dense is not None
        rows = bench_generation([dense, out], workload, threads=1, seconds=0.01, listener=listener)
        assert [row.folder for row in rows] == [dense, out]
        assert rows[0].cache_bytes == 2 * rows[1].cache_bytes
    assert not dense.exists()


@pytest.mark.parametrize("model", ["gone", "damaged.onnx"])
def test_a_model_that_cannot_be_loaded_is_not_timed(finished: tuple[Path, Report], model: str, tmp_path: Path) -> None:
    out = with_recipe(shutil.copytree(finished[0], tmp_path / "out"), model=str(tmp_path / model))
    (tmp_path / "damaged.onnx").write_bytes(b"no graph")
    listener = RecordingListener()
    with whole_engines(out, Workload(((1, 4),), 4), 1, listener) as dense:
        assert dense is None
    assert listener.codes == [NoteCode.NO_DENSE_GRAPH]


def test_code_that_a_report_names_is_not_run(
    finished: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_report.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    out = with_recipe(shutil.copytree(finished[0], tmp_path / "out"), task="named_by_report:Task")
    with whole_engines(out, Workload(((1, 4),), 4), 1, NullListener()) as dense:
        assert dense is not None


@pytest.mark.parametrize(
    "runtime", [RUNTIMES[0], *(pytest.param(name, marks=pytest.mark.zoo) for name in RUNTIMES[1:])]
)
@pytest.mark.usefixtures("shared_exports")
def test_attempts_are_scored_with_the_rounded_weights_that_are_delivered(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: dict[str, float] = {}
    write = within._Search._write

    def record(search: within._Search, attempts: Sequence[within._Attempt]) -> None:
        scored.update({json.dumps(each.counts): each.score.metric for each in attempts if each.score is not None})
        write(search, attempts)

    monkeypatch.setattr(within._Search, "_write", record)
    monkeypatch.setattr(within, "upper_losses", lambda whole, scores, **kind: [0.0] * len(scores))
    torch.manual_seed(0)
    model, rows, out = folders.save(folders.gpt2(), tmp_path / "model"), str(write_rows(tmp_path)), tmp_path / "out"
    chosen: dict[str, Any] = {"precision": "int4w", "target": runtime, "max_drop": 1e3, "distill": False}
    report = compressor.compress(Recipe(model=model, data=rows, out=out, **chosen, **SHORT))
    assert report.generation is not None
    (delivered,) = report.generation.candidates
    kept = json.dumps({group.name: len(group.kept) for group in report.plan.groups})
    assert scored[kept] == pytest.approx(delivered.metric, rel=1e-6)


@pytest.mark.zoo
@pytest.mark.usefixtures("shared_exports")
def test_budgets_of_time_are_judged_by_the_engine_that_is_chosen(tmp_path: Path) -> None:
    """Runtime and precision are chosen, and every engine of so small a model meets these times."""
    model, out = folders.save(folders.gpt2(), tmp_path / "model"), tmp_path / "out"
    budget = {"latency": "1000ms/token", "ttft": "1000ms", "cache": "50%"}
    chosen: dict[str, Any] = {"target": "auto", "precision": "auto", "max_drop": 1e3}
    recipe = Recipe(model=model, data=str(write_rows(tmp_path)), out=out, **budget, **chosen, **SHORT)
    report = compressor.compress(recipe)
    assert report.generation is not None
    ratios: dict[str | None, float] = {each.phase: each.speed.ratio for each in report.generation.speeds}
    rows = {row.phase: row for row in report.budget if row.unit == "ms" and row.requested is not None}
    assert set(rows) == {"prompt", "token"}
    for phase, row in rows.items():
        assert row.met == (row.reached <= MAX_BUDGET_RATIO * (row.requested or 0.0))
        assert row.reached == pytest.approx(row.dense / ratios[phase])
    (delivered,) = (each for each in report.candidates if each.chosen)
    assert (delivered.label, delivered.failure) == (report.delivered, "")
    (rounded,) = (each for each in report.generation.candidates if each.chosen)
    assert (rounded.precision, rounded.failure) == (report.generation.precision.partition(" ")[0], "")
    assert cached_target(out).open_sessions(out, threads=1).precision == report.generation.precision


@pytest.mark.usefixtures("shared_exports")
def test_without_a_cache_only_the_graph_of_whole_texts_is_written(tmp_path: Path) -> None:
    model = folders.save(folders.gpt2(), tmp_path / "model")
    out = tmp_path / "out"
    report = compressor.compress(
        Recipe(model=model, data=str(write_rows(tmp_path)), macs="60%", out=out, no_cache=True, **SHORT)
    )
    assert report.generation is None
    assert not (out / DECODER).exists()


@pytest.mark.parametrize("precision", ["fp32", "int4w"])
@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (MismatchError(code=ErrorCode.NUMBERS_DIFFER), False),
        (InputError(code=ErrorCode.RUNTIME_FAILED), False),
        (InputError(code=ErrorCode.UNSUPPORTED_MODEL), True),
        (InputError(code=ErrorCode.EXPORT_FAILED), True),
        (GraphPassError(), True),
    ],
    ids=lambda case: str(getattr(case, "code", case)),
)
def test_a_refusal_is_a_note_and_a_proof_that_does_not_hold_an_error(
    error: Exception, precision: str, *, is_refusal: bool
) -> None:
    log, recipe = RunLog(NullListener()), Recipe(model=Path("model"), precision=precision)
    run = cast(RunContext, SimpleNamespace(log=log, recipe=recipe))
    is_noted = is_refusal and precision == "fp32"
    with nullcontext() if is_noted else pytest.raises(type(error)), _refusal_noted(run):
        raise error
    assert [note.code for note in log.notes] == ([NoteCode.NO_CACHE] if is_noted else [])


@pytest.mark.zoo
def test_nothing_is_delivered_where_a_proof_of_caches_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compressor.generation import export_module

    def export_wrong(network: Any, plan: Plan, folder: Path, **options: Any) -> tuple[str, ...]:
        files = export_generation(network, plan, folder, **options)
        graph = load(folder / DECODER)
        weights = graph.graph.initializers["transformer.wpe.weight"]
        assert weights.const_value is not None
        weights.const_value = ir.tensor(-weights.const_value.numpy(), name=weights.name)
        save(graph, folder / DECODER)
        return files

    monkeypatch.setattr(export_module, "export_generation", export_wrong)
    model, out = folders.save(folders.gpt2(), tmp_path / "model"), tmp_path / "out"
    recipe = Recipe(model=model, data=str(write_rows(tmp_path)), macs="60%", out=out, **SHORT)
    with pytest.raises(MismatchError) as raised:
        compressor.compress(recipe)
    assert (raised.value.code, raised.value.details["stage"]) == (ErrorCode.NUMBERS_DIFFER, CACHED_STAGES[0])
    assert not out.exists()
    assert compressor.compress(recipe.updated(no_cache=True)).generation is None  # as the message advises


@pytest.mark.zoo
def test_a_model_with_another_state_is_delivered_without_caches(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 20}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    heads |= {"attn_layer_period": 2, "attn_layer_offset": 1}
    config = hf.JambaConfig(**sizes, **heads, num_experts=1, num_experts_per_tok=1, use_mamba_kernels=False)
    model = folders.save(hf.JambaForCausalLM(config), tmp_path / "model")
    out = tmp_path / "out"
    report = compressor.compress(Recipe(model=model, data=str(write_rows(tmp_path)), macs="80%", out=out, **SHORT))
    assert report.generation is None
    assert NoteCode.NO_CACHE in {note.code for note in report.notes}
    assert not list(out.glob("decoder*"))
