"""Advice of `run`: see `tests.advice.world`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from compressor.config.run import Recipe
from compressor.config.sections import MeasureConfig
from compressor.config.steps import Distill, Units, Within
from compressor.results import Note, Proof, ProofStage
from compressor.run.generation import require_weights
from tests import folders
from tests.advice.world import SHORT, World, advice


@advice("run.steps.distill affordable_length.measure out-of-range", zoo=True)
def _(w: World) -> None:
    w.learns()
    distill = w.run("--plan", "plan.json", "--distill", "--distill-steps", "2", "--batch-size", "8")
    w.fails(*distill, "--minutes", "1e-9")
    w.right(*distill, "--minutes", "1")
    w.right(*distill, "--minutes", "0.05", "--batch-size", "2")


@advice("run.steps.distill _check unsupported-model")
def _(w: World) -> None:
    from compressor.run.steps import distill

    model: Any = SimpleNamespace(folder=SimpleNamespace(family="transfo-xl"))
    rows: Any = SimpleNamespace(eval_task=SimpleNamespace(chooser=SimpleNamespace(reads_streams=True)))
    inputs: Any = SimpleNamespace(model=model, rows=rows)
    w.fails(distill._check, Distill(), inputs, ())
    w.right(*w.keep_one())


@advice("run.steps.blocks _check contradiction")
def _(w: World) -> None:
    command = w.run("--macs", "80%", "--drop-blocks", "50%", "--training-steps", "2")
    w.fails(*command, "--from-original-weights")
    w.right(*command)


@advice("run.steps.distill _check missing-value", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    command = (run, "--data", "rows.tsv", "--plan", run / "plan.json", "--distill", "--max-length", "8", "-o", "out")
    w.fails(*command)
    w.right(*command, "--teacher", "model")


@advice("run.steps.distill require_same_interface.refuse text")
def _(w: World) -> None:
    from tests.cli.bad_inputs import teacher_of_another_vocabulary

    command = teacher_of_another_vocabulary(w.path)
    w.fails(*command, "-o", "out")
    w.right(*command[:-1], "model", "-o", "out")
    w.right(*command[:-2], "-o", "out")


@advice("run.steps.distill require_same_interface text")
def _(w: World) -> None:
    folders.save(_deeper(), w.file("teacher"))
    command = w.run("--plan", "plan.json", "--distill", "--teacher", "teacher", "--hidden-weight")
    w.fails(*command, "1")
    w.right(*command, "0")


def _deeper() -> Any:
    import transformers as hf

    return hf.BertForSequenceClassification(hf.BertConfig(**{**folders.SIZES, "num_hidden_layers": 2}))


@advice("training.distillation rank_documents contradiction")
def _(w: World) -> None:
    w.fails(*w.run("--macs", "70%", "--match-dense"))
    w.right(*w.run("--macs", "70%"))


@advice("training.distillation rank_documents text")
def _(w: World) -> None:
    from compressor.model_folder import load
    from compressor.training.distillation import rank_documents

    folders.save_sentence_encoder(w.file("encoder"))
    w.rows("pairs.tsv", "text_a\ttext_b", *(f"the good film\tthe {word} film" for word in folders.WORDS))
    folder = load(w.file("encoder"))
    data: Any = SimpleNamespace(train=())
    w.fails(rank_documents, folder, data, 0)
    w.right("encoder", "--match-dense", "--macs", "70%", "-o", "out", "--data", "pairs.tsv")


def _raise(error: Exception) -> None:
    raise error


@advice("run.ladder _check_folders text")
def _(w: World) -> None:
    ladder = ("model", "--data", "rows.tsv", "--macs", "80%,60%", "-o")
    w.fails(*ladder, "model")
    w.right(*ladder, "ladder")


@advice("run.ladder _check_folders text #2", zoo=True)
def _(w: World) -> None:
    ladder = ("model", "--data", "rows.tsv", "--macs", "80%,60%", "-o")
    w.fails(*ladder, w.finished())
    w.right(*ladder, "ladder")


@advice("run.step_stores _discard_others text")
def _(w: World) -> None:
    from compressor.run.step_stores import _discard_others
    from compressor.store import FORM, Store

    def open_store(key: str, folder: str = "store", **settings: bool) -> None:
        store = Store(w.file(folder) / "heads", {"step": key})
        list(_discard_others(w.file(folder), [store], **{"force": False, **settings}))

    w.right(open_store, "first")
    w.rows("store/heads/key.json", json.dumps({"form": FORM, "step": "first"}))
    w.rows("store/heads/plan/done.json", "{}")
    w.fails(open_store, "second")
    w.right(open_store, "first")
    w.right(open_store, "second", "another")
    w.right(lambda: open_store("second", force=True))


@advice("run.load load_named_folder code")
def _(w: World) -> None:
    command = w.run("--plan", "plan.json", "--distill", "--teacher")
    w.fails(*command, "nowhere")
    w.right(*command, "model")


@advice("run.load _check_work_folders file-unwritable")
def _(w: World) -> None:
    w.rows("file", "")
    w.fails(*w.run("--macs", "70%", "--statistics", "file"))
    w.right(*w.run("--macs", "70%", "--statistics", "folder"))


@advice("run.steps.blocks _check text")
def _(w: World) -> None:
    from compressor.run.steps import blocks
    from tests.tasks.pictures import save_classifier, write_folder

    write_folder(w.file("images"), 6)
    save_classifier(w.file("vit"))
    w.patch.setattr(blocks, "require_interface", lambda *_, **__: None)
    command = ("vit", "--data", "images", "--keep", "1", "--training-steps", "2", "-o", "out")
    w.fails(*command, "--drop-blocks", "50%")
    w.right(*command)


@advice("run.load _check_calibration missing-value")
def _(w: World) -> None:
    w.fails("model", "--plan", "plan.json", "--precision", "int8", "-o", "out")
    w.right("model", "--plan", "plan.json", "--precision", "int8", "-o", "out", "--data", "rows.tsv")


@advice("run.steps.units _check text")
def _(w: World) -> None:
    w.rows("few.tsv", "label\ttext", "0\tbad", "1\tgood", "0\tbad film")
    w.rows("enough.tsv", "label\ttext", "0\tbad", "1\tgood", "0\tbad film", "1\tgood film")
    command = ("model", "--eval-data", "rows.tsv", "--macs", "60%", "-o", "out", "--data")
    w.fails(*command, "few.tsv")
    w.right(*command, "enough.tsv")


@advice("run.load with_point text")
def _(w: World) -> None:
    command = ("model", "--data", "rows.tsv", "-o", "out")
    w.notes(*command)
    w.right(*command, "--max-drop", "0.02")


@advice("run.load _require_labels column-missing")
def _(w: World) -> None:
    words = folders.WORDS
    texts = [f"the {words[n % 20]} {words[n % 7]} film" for n in range(40)]
    w.rows("texts.tsv", "text", *texts)
    w.rows("pairs.tsv", "score\tsentence1\tsentence2", *(f"{n % 7}\t{texts[n]}\t{texts[-n]}" for n in range(40)))
    folders.save_sentence_encoder(w.file("encoder"))
    command = ("encoder", "--data", "texts.tsv", "--macs", "60%", "--max-drop", "0.1", "--metric", "recall@10")
    w.fails(*command)
    w.right(*command, "--test-data", "pairs.tsv")


@advice("run.steps.heads _check_options contradiction")
def _(w: World) -> None:
    from compressor.run.steps import heads

    w.patch.setattr(heads, "process_count", lambda: 2)
    w.patch.setattr(heads, "refuse_processes", _raise)
    command = w.run("--method", "taylor", "--keep", "1")
    w.fails(*command)
    w.patch.setattr(heads, "process_count", lambda: 1)
    w.right(*command)
    w.right(*command, "--ray", "local")


@advice("run.pipeline _refuse_inputs_inside_output contradiction", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    command = ("model", "--plan", run / "plan.json", "--force", "-o")
    w.fails(*command, run)
    w.right(*command, "another")


@advice("run.plan_source check_start text")
def _(w: World) -> None:
    w.fails(*w.run("--macs", "50%", "--start-from", "model"))
    w.right(*w.run("--macs", "50%", "--start-from", w.pruned()))


@advice("run.plan_source _other_model_error text", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    plan = json.loads((run / "plan.json").read_text())
    plan["groups"][0].update(heads=4, kv_heads=4)
    (run / "plan.json").write_text(json.dumps(plan))
    w.fails(*w.run("--macs", "50%", "--start-from", run))
    w.right(*w.run("--macs", "50%", "--start-from", w.pruned()))


@advice("run.plan_source check_bundles file-mismatch", zoo=True)
def _(w: World) -> None:
    import transformers as hf

    sizes: dict[str, Any] = {**folders.SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    folders.save(hf.LlamaForSequenceClassification(hf.LlamaConfig(**sizes, pad_token_id=0)), w.file("llama"))
    w.whole()
    short = ("--data", "rows.tsv", "--batch", "1", "--seq", "8", "--max-length", "8", "--seconds", "0.01")
    command = ("llama", *short, "--threads", "1", "--prune-units", "heads", "--group-by")
    w.right(*command, "query", "--macs", "80%", "-o", "start")
    w.fails(*command, "kv", "--macs", "70%", "--start-from", "start", "-o", "out")
    w.right(*command, "query", "--macs", "70%", "--start-from", "start", "-o", "out")
    neurons = ("--prune-units", "neurons", "--macs", "75%")
    w.right(*command, "kv", *neurons, "--start-from", "start", "-o", "out2")


@advice("run.steps.blocks _require_heads_alone plan-mismatch", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    plan = json.loads((run / "plan.json").read_text())
    groups = [{**group, "kept": [], "scale": []} if "kv_heads" in group else group for group in plan["groups"]]
    (run / "plan.json").write_text(json.dumps({**plan, "groups": groups}))
    command = (run, "--data", "rows.tsv", "--training-steps", "2", "--batch", "1", "--seq", "8", "-o", "out")
    w.learns()
    w.fails(*command, "--drop-blocks", "50%")
    w.right(w.finished(), *command[1:], "--drop-blocks", "50%")


@advice("config.unused_flags nothing_learned_note text #2")
def _(w: World) -> None:
    w.notes("model", "-o", "out")
    w.right("model", "--data", "rows.tsv", "--keep", "1", "-o", "out")


@advice("config.unused_flags nothing_learned_note text")
def _(w: World) -> None:
    w.notes("model", "-o", "out")
    w.right("model", "--data", "rows.tsv", "--keep", "1", "-o", "out")


@advice("config.unused_flags nothing_learned_note text #4")
def _(w: World) -> None:
    w.notes("model", "-o", "out")
    w.right("model", "--plan", "plan.json", "-o", "out")


@advice("config.unused_flags nothing_learned_note text #3")
def _(w: World) -> None:
    import transformers as hf

    config = hf.FNetConfig(vocab_size=25, hidden_size=16, num_hidden_layers=1, intermediate_size=20)
    folders.save(hf.FNetForSequenceClassification(config), w.file("fnet"))
    w.notes("fnet", "-o", "out")
    w.right("fnet", "--data", "rows.tsv", "--macs", "70%", "-o", "out")


@advice("run.steps.units timed_sizes contradiction")
def _(w: World) -> None:
    from compressor.run.steps.units import timed_sizes

    step = Units(macs=0.5, budget_at=("4x8",))
    w.fails(timed_sizes, step, MeasureConfig(batch=(1,)), [8])
    w.right(timed_sizes, step, MeasureConfig(batch=(1, 4)), [8])


@advice("pruning.costs _macs unsupported-model")
def _(w: World) -> None:
    from compressor.pruning import costs

    w.patch.setattr(costs, "macs", lambda *_: None)
    w.patch.setattr(costs, "uncounted_node", lambda *_: "product_7")
    w.fails(costs._macs, None, 1, 8)
    w.right(*w.keep_one())


@advice("run.steps.units _require_no_caches contradiction")
def _(w: World) -> None:
    from compressor.run.steps.units import _require_no_caches

    w.fails(_require_no_caches, Units(ttft="5ms"))
    w.fails(_require_no_caches, Units(latency="5ms/token"))
    w.right(_require_no_caches, Units(macs=0.5))


@advice("run.sizes work_out_workload too-long")
def _(w: World) -> None:
    from compressor.run.sizes import work_out_workload

    folder: Any = SimpleNamespace(model=folders.gpt2())
    w.fails(work_out_workload, MeasureConfig(prompt_tokens=(10_000,)), folder, None)
    w.right(work_out_workload, MeasureConfig(prompt_tokens=(4,), new_tokens=4), folder, None)


@advice("engines.trials no_time unsupported")
def _(w: World) -> None:
    from compressor.config.sections import EngineConfig
    from compressor.engines import choose, trials
    from compressor.engines.choices import Choice
    from compressor.results import Candidate

    def try_engines(is_late: bool) -> None:
        built = trials.Trial(Choice(EngineConfig()), Candidate(target="ort", precision="fp32"))
        parts: Any = SimpleNamespace(is_late=is_late, build=lambda *_: built, score=lambda trial: trial)
        for trial in choose._built(parts, [built.choice, built.choice], {}):
            if trial.error is not None:
                raise trial.error

    w.fails(try_engines, True)
    w.right(try_engines, False)


@advice("pruning.bisect require_informed label-mismatch")
def _(w: World) -> None:
    informed(w, "the labels are in another order")


@advice("pruning.bisect require_informed label-mismatch #2")
def _(w: World) -> None:
    informed(w, None)


def informed(w: World, order: str | None) -> None:
    """A whole model whose metric shows nothing, and one whose metric does."""
    from compressor.pruning.bisect import require_informed

    w.fails(require_informed, SimpleNamespace(metric=0.5, constant=0.5, order=order), "accuracy")
    w.right(require_informed, SimpleNamespace(metric=0.9, constant=0.5, order=None), "accuracy")


@advice("run.model_units prunable_groups site-refused")
def _(w: World) -> None:
    from compressor.run.model_units import prunable_groups
    from tests.run.budgets import test_prunable_groups as cases

    model: Any = SimpleNamespace(**{**vars(cases.MODEL), "sites": (SimpleNamespace(batch_axis=1),)})
    w.fails(prunable_groups, cases.units(), model, ())
    w.right(*w.keep_one())


@advice("run.model_units prunable_groups site-refused #2")
def _(w: World) -> None:
    from compressor.run.model_units import prunable_groups
    from tests.run.budgets import test_prunable_groups as cases

    w.fails(prunable_groups, cases.units(), cases.MODEL, [cases.refusal(cases.HEADS[1])])
    w.right(prunable_groups, cases.units(skip_refused=True), cases.MODEL, [cases.refusal(cases.HEADS[1])])
    w.right(*w.run("--macs", "50%", "--attention", "sdpa"))
    w.right(*w.run("--macs", "50%", "--opset", "23"))


@advice("run.model_units prunable_groups site-refused #3")
def _(w: World) -> None:
    from compressor.run.model_units import prunable_groups
    from tests.run.budgets import test_prunable_groups as cases

    refused = [cases.refusal(*cases.HEADS)]
    w.fails(prunable_groups, cases.units(prune_units="heads", skip_refused=True), cases.MODEL, refused)
    w.right(prunable_groups, cases.units(prune_units="neurons"), cases.MODEL, refused)


@advice("config.unused_flags unused_field_notes length-limited")
def _(w: World) -> None:
    w.notes(*w.keep_one("--max-length", "64"))
    w.right(*w.keep_one("--max-length", "16"))


@advice("config.unused_flags _unused_fields text")
def _(w: World) -> None:
    w.notes(*w.keep_one("--block-size", "8"))
    w.right(*w.keep_one("--block-size", "8", "--drop-blocks", "50%"))
    w.right(*w.keep_one("--block-size", "8", "--drop-blocks-by-kind", "bidirectional=50%"))


@advice("config.unused_flags _unused_fields text #2")
def _(w: World) -> None:
    w.notes(*w.keep_one("--epochs", "2"))
    w.right(*w.run("--keep", "1", "--epochs", "2"))


@advice("config.unused_flags order_notes heads-selected-first")
@advice("config.unused_flags order_notes text")
def _(w: World) -> None:
    w.notes(*w.run("--method", "taylor", "--keep", "1", "--macs", "70%"))
    w.right(*w.run("--macs", "70%"))


@advice("run.plan_source selection_notes text")
def _(w: World) -> None:
    from compressor.run.plan_source import selection_notes
    from compressor.selection.plan_and_curves import SelectedPlan
    from graph_passes import Plan

    folder: Any = SimpleNamespace(config=None, task="text-classification")
    selected = SelectedPlan(Plan.load(w.file("plan.json")))
    w.notes(lambda: list(selection_notes(folder, selected, None)))
    w.right(lambda: list(selection_notes(folder, selected, SimpleNamespace(test=[1]))))  # type: ignore[arg-type]


@advice("run.run_notes graph_notes positions-dropped", zoo=True)
def _(w: World) -> None:
    w.whole()
    w.notes(*w.run("--plan", "plan.json"))
    w.right(*w.run("--plan", "plan.json", "--keep-unread-positions", "--force"))


@advice("run.run_notes speed_notes speed-uncertain")
def _(w: World) -> None:
    from compressor.run.run_notes import speed_notes
    from tests.report import reports

    speed = reports.speed(1, 128, 40.0, 20.0)
    w.notes(lambda: list(speed_notes([speed.model_copy(update={"low": 0.5, "high": 4.0})])))
    w.right(lambda: list(speed_notes([speed.model_copy(update={"low": 1.99, "high": 2.01})])))


def masked_plan(w: World) -> None:
    """Let the plan of the inputs have masks of 8 positions."""
    import numpy as np

    from graph_passes import BlockMask, Plan

    plan = Plan.load(w.file("plan.json"))
    mask = BlockMask(np.ones((plan.sites[0].heads, 1, 1), dtype=bool), 8)
    plan.masked({site.name: mask for site in plan.sites}).save(w.file("plan.json"))


@advice("run.sizes work_out_sizes too-long")
def _(w: World) -> None:
    masked_plan(w)
    lines = [f"{n % 2}\tthe very very very very very very very good film" for n in range(40)]
    w.rows("long.tsv", "label\ttext", *lines)
    command = ("model", "--plan", "plan.json", "--data", "long.tsv", "--distill", "-o", "out", "--batch", "1")
    w.fails(*command)
    w.right(*command, "--max-length", "8")


@advice("run.sizes timed_lengths text")
def _(w: World) -> None:
    from tests.tasks.pictures import save_classifier, write_folder

    write_folder(w.file("images"), 6)
    save_classifier(w.file("vit"))
    command = ("vit", "--data", "images", "--macs", "50%", "-o", "out")
    w.fails(*command, "--seq", "8")
    w.right(*command)


@advice("run.sizes timed_lengths too-long")
def _(w: World) -> None:
    command = (
        "model",
        "--data",
        "rows.tsv",
        "--drop-blocks",
        "50%",
        "--training-steps",
        "2",
        "--batch",
        "1",
        "-o",
        "out",
    )
    w.fails(*command, "--max-length", "8", "--seq", "16")
    w.right(*command, "--max-length", "8", "--seq", "8")
    w.right(*command, "--max-length", "16", "--seq", "16")


@advice("engines.build require_precision products-in-float")
def _(w: World) -> None:
    from compressor.config.sections import EngineConfig
    from compressor.engines.build import require_precision

    engine: Any = SimpleNamespace(precision="bf16", products={"bf16": 3, "fp32": 1}, quantized=None)
    w.fails(require_precision, engine, EngineConfig(target="openvino", precision="bf16"))
    config = EngineConfig(target="openvino", precision="bf16", allow_float_products=True)
    w.right(require_precision, engine, config)


@advice("engines.build require_precision products-in-float #2")
def _(w: World) -> None:
    from compressor.config.sections import EngineConfig
    from compressor.engines.build import require_precision

    quantized = SimpleNamespace(requested=4, executed=3, in_float=("product",))
    engine: Any = SimpleNamespace(precision="int8", products={}, quantized=quantized)
    w.fails(require_precision, engine, EngineConfig(target="openvino", precision="int8"))
    config = EngineConfig(target="openvino", precision="int8", allow_float_products=True)
    w.right(require_precision, engine, config)


@advice("engines.build require_complete text", zoo=True)
def _(w: World) -> None:
    import graph_passes
    from tests.run.runs import refuse_drops

    name = graph_passes.Plan.load(w.file("plan.json")).sites[0].name
    w.whole()
    refuse_drops(w.patch, name)
    w.fails(*w.keep_one())
    w.right(*w.run("--plan", "plan.json"))


@advice("run.rebuild _note_what_to_expect text", zoo=True)
def _(w: World) -> None:
    w.whole()
    run = w.finished()
    report = json.loads((run / "report.json").read_text())
    report["graphs"].pop("dense.onnx")
    (run / "report.json").write_text(json.dumps(report))
    (run / "dense.onnx").unlink()
    build = ("build", "--seconds", "0.01", "--threads", "1")
    w.notes(*build, run)
    w.right(*w.run("--plan", "plan.json", "--save-dense"))
    w.right(*build, w.out)


@advice("engines.choose _choice text", unfollowed="needs a processor with bfloat16")
def _(w: World) -> None:
    from compressor.engines.choose import _notes
    from compressor.results import Candidate

    row = Candidate(target="openvino", precision="bf16", agreement=0.9, holds=False, chosen=True)
    w.notes(lambda: list(_notes([row], (), is_bounded=False)))


@advice("run.rebuild _mixed text", zoo=True)
def _(w: World) -> None:
    w.whole()
    w.right(*w.run("--plan", "plan.json", "--data", "rows.tsv", "--target", "ort", "--precision", "int8"))
    report = json.loads((w.out / "report.json").read_text())
    report["recipe"]["precision"] = "auto"
    report["delivered"] += ", where faster"
    (w.out / "report.json").write_text(json.dumps(report))
    w.patch.setattr("compressor.engines.matmul_times._time_ratio", lambda *arguments: 2.0)
    build = ("build", w.out, "--seconds", "0.01", "--threads", "1")
    w.notes(*build)
    w.right(*build, "--precision", "fp32")


@advice("run.rebuild _note_build text")
def _(w: World) -> None:
    from compressor.config.sections import EngineConfig
    from compressor.progress import NullListener, RunLog
    from compressor.run.rebuild import _note_build
    from graph_passes import Plan

    def note(**fields: Any) -> None:
        report = SimpleNamespace(recipe={"kernel": "kernel.so"}, plan=Plan.load(w.file("plan.json")))
        recipe = SimpleNamespace(engine=EngineConfig(**fields))
        run: Any = SimpleNamespace(report=report, recipe=recipe, lengths=(8,))
        _note_build(run, RunLog(NullListener()), lost=False)

    w.notes(note)
    w.right(lambda: note(kernel="kernel.so"))


@advice("run.rebuild load_run file-missing", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    w.whole()
    build = ("--target", "openvino", "--precision", "int8", "--seconds", "0.01", "--threads", "1")
    w.fails("build", run, *build)
    w.right(*w.run("--plan", "plan.json", *build[:4], "--allow-float-products"))
    w.right("build", w.out, *build, "--allow-float-products")


@advice("run.plan_source _fitted_weights.missing text", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    plan = json.loads((run / "plan.json").read_text())
    (w.file("plan.json")).write_text(json.dumps(plan))
    w.fails(*w.run("--plan", "plan.json", "--distill"))
    w.right(run, *w.run("--plan", run / "plan.json", "--distill", "--teacher", "model")[1:])


@advice("run.steps.distill constant text", zoo=True)
def _(w: World) -> None:
    w.learns()
    command = w.run("--plan", "plan.json", "--distill", "--distill-steps", "4", "--batch-size", "8")
    w.fails(*command, "--distill-learning-rate", "1e30")
    w.right(*command, "--distill-learning-rate", "1e-4", "--force")


@advice("run.model_units _known_times text", zoo=True)
def _(w: World) -> None:
    w.patch.setenv("XDG_CACHE_HOME", str(w.path))
    w.notes("sites", "model")
    w.right("costs", "model", "--seq", "8", "--batch", "1", "--threads", "1")
    w.right("sites", "model")


@advice("engines.choose _notes text")
def _(w: World) -> None:
    notes_of_choice(w, rows=(8, 4096))


@advice("engines.choose _notes text #2")
def _(w: World) -> None:
    notes_of_choice(w, bounded=(False, True))


def notes_of_choice(w: World, rows: tuple[int, int] = (4096, 4096), bounded: tuple[bool, bool] = (True, True)) -> None:
    """The notes of a choice before and after the advice is followed."""
    from compressor.engines.choose import _notes
    from compressor.results import MetricUnit

    best: Any = SimpleNamespace(
        precision="fp32", target="ort", chosen=True, quantized=1, difference=-0.01, unit=MetricUnit.POINTS,
        label="ort fp32", in_float=(), holds=True,
    )  # fmt: skip

    def notes(count: int, is_bounded: bool) -> None:
        graphs: Any = [SimpleNamespace(rows=count, ruined=(), in_float=())]
        list(_notes([best], graphs, is_bounded=is_bounded))

    w.notes(notes, rows[0], bounded[0])
    w.right(notes, rows[1], bounded[1])


@advice("run.pipeline _quantize_for_target text", unfollowed="needs a GPU and TensorRT", zoo=True)
def _(w: World) -> None:
    w.whole()
    w.fails_with_note(*w.run("--plan", "plan.json", "--target", "trt", "--precision", "int8"))


@advice("run.load missing_target text", unfollowed="needs a GPU and TensorRT")
def _(w: World) -> None:
    from compressor.cli.console import Console
    from compressor.cli.run import finish
    from compressor.results import DropStatus, MissingTarget
    from tests.report import reports

    command = "compress build out --target trt"
    missing = MissingTarget(target="trt", reason="no GPU", command=command)
    console = Console()
    w.fails(finish, console, reports.report(missing=missing, drop_status=DropStatus.PASSED), w.out)


@advice("run.rebuild _note_what_to_expect text #2", unfollowed="needs TensorRT 8.6")
def _(w: World) -> None:
    from compressor.progress import NullListener, RunLog
    from compressor.results import Note, NoteCode
    from compressor.run import rebuild

    w.patch.setattr(rebuild, "target", lambda name: SimpleNamespace(drops_positions=False))
    note = Note(code=NoteCode.POSITIONS_DROPPED, text="some")
    run: Any = SimpleNamespace(
        graphs={"dense": w.file("dense.onnx"), "compressed": w.file("dense.onnx")},
        report=SimpleNamespace(notes=(note,)),
        recipe=SimpleNamespace(engine=SimpleNamespace(target="trt")),
    )
    w.notes(rebuild._note_what_to_expect, run, RunLog(NullListener()))


@advice("run.proof_lengths _unproven_note lengths-unproven")
def _(w: World) -> None:
    from compressor.run.proof_lengths import _unproven_note

    w.notes(_unproven_note, [8])
    w.right(*w.run("--plan", "plan.json", "--seq", "9"))
    w.right(_unproven_note, [])


@advice("run.proof_lengths _tied_note lengths-unproven")
def _(w: World) -> None:
    from compressor.run.proof_lengths import _tied_note

    def note(*numbers: int) -> list[Note]:
        return [_tied_note(number) for number in numbers]

    w.notes(note, 8)
    w.right(*w.run("--plan", "plan.json", "--seq", "9"))
    w.right(note)


@advice("engines.prove _remedy text", zoo=True)
@advice("engines.prove _remedy text #2", zoo=True)
def _(w: World) -> None:
    from compressor.targets import target
    from tests.engines.test_fixed_shapes import wrong

    w.whole()
    short = ("--seconds", "0.01", "--threads", "1", "--allow-float-products")
    runtime = type(target("openvino"))
    with w.patch.context() as patch:
        patch.setattr(runtime, "run_fixed", wrong)
        w.notes(*w.run("--plan", "plan.json", "--target", "openvino", "--precision", "int8", short[-1]))
    command = re.compile(r"compress (build) OUT (--target \S+ --precision \w+)")
    advised = [match for text in w.texts for match in command.findall(text)]
    builds = [[name, w.out, *flags.split()] for name, flags in advised]
    assert len(builds) == 2
    for build in builds:
        w.right(*build, *short)
        assert json.loads((w.out / "report.json").read_text())["precision"] == build[-1]


@advice("models.export_forms with_other_form text", zoo=True)
def _(w: World) -> None:
    import transformers as hf

    folders.save(hf.BertForSequenceClassification(hf.BertConfig(**{**folders.SIZES, "intermediate_size": 28})), w.model)
    forward = hf.BertModel.forward

    def branching(self: Any, input_ids: Any, *arguments: Any, **inputs: Any) -> Any:
        is_odd = self.config._attn_implementation == "eager" and int(input_ids.sum()) < 0
        return forward(self, -input_ids if is_odd else input_ids, *arguments, **inputs)

    w.patch.setattr(hf.BertModel, "forward", branching)
    w.whole()
    command = ("model", "-o", "out", *SHORT[4:])
    w.fails(*command)
    w.right(*command, "--attention", "sdpa")


def _attempts(w: World, **attributes: Any) -> Any:
    """What decides on attempts, of which one is stored, with the deadline in the past."""
    from compressor.pruning.bisect import ResampledScore
    from compressor.results import MetricUnit
    from compressor.run.steps import within
    from compressor.store import Store

    task = SimpleNamespace(metric="accuracy", metric_unit=MetricUnit.POINTS, higher_is_better=True)
    search = object.__new__(within._Search)
    search.step = Within(max_drop=0.01, minutes=1, steps=[{"units": {}}, {"distill": {}}])
    run = SimpleNamespace(
        rows=SimpleNamespace(task=task, eval_task=task, eval=range(10)), log=SimpleNamespace(start=0.0)
    )
    search.context = SimpleNamespace(run=run)  # type: ignore[assignment]
    search.store, search.base = Store(w.path, version=1), SimpleNamespace(engine=None)  # type: ignore[assignment]
    search.costs = SimpleNamespace(deciding=[SimpleNamespace(dense=1.0, cost=lambda counts: 0.5)])  # type: ignore[assignment]
    search.deadline, search._score_seconds, search.searched = 0.0, 0.0, 10
    search.whole = ResampledScore(0.9, np.array([0.8, 1.0]), 0.0)
    search._write([within._Attempt(speedup=2.0, **attributes)])
    return search


@advice("run.steps.within _Search._note text")
def _(w: World) -> None:
    from compressor.run.steps import within

    search = _attempts(w)
    w.notes(search._note, within._stored(search.store), [])
    w.right(*w.run("--distill", "--max-drop", "0.5"))


@advice("run.steps.within _Search._note text #2")
def _(w: World) -> None:
    from compressor.pruning.bisect import ResampledScore
    from compressor.run.steps import within

    search = _attempts(w, score=ResampledScore(0.9, np.array([0.9, 0.7]), 0.1))
    w.notes(search._note, within._stored(search.store), [])
    w.right(*w.run("--distill", "--max-drop", "0.5", "--eval-data", "rows.tsv"))


@advice("run.steps.within _Search._unseen_notes text")
def _(w: World) -> None:
    from compressor.pruning.bisect import ResampledScore
    from compressor.run.steps import within

    search = _attempts(w, score=ResampledScore(0.9, np.array([0.8, 1.0]), 0.1))
    w.notes(lambda: list(search._unseen_notes(within._stored(search.store), [0])))
    w.right(*w.run("--distill", "--max-drop", "0.5", "--eval-data", "rows.tsv"))


def _round_weights(w: World, *, generates: bool = True, **fields: Any) -> Callable[[], None]:
    """Checks a recipe on a model that generates, or on another one."""
    recipe = Recipe(model=w.model, data=w.file("rows.tsv"), keep=1, **{"precision": "int4w", **fields})
    return lambda: require_weights(recipe, SimpleNamespace(generates=generates))  # type: ignore[arg-type]


@advice("run.generation require_weights text")
@advice("run.generation require_weights text #2")
def _(w: World) -> None:
    w.fails(_round_weights(w, target="trt"))
    w.right(_round_weights(w, target="trt", precision="int8"))
    for target in ("ort", "openvino"):
        w.right(_round_weights(w, target=target))


@advice("run.generation require_weights text #3")
def _(w: World) -> None:
    w.fails(_round_weights(w, provider="cuda"))
    w.right(_round_weights(w))


@advice("run.generation require_weights text #4")
def _(w: World) -> None:
    w.fails(*w.keep_one("--precision", "int4w"))
    w.right(*w.keep_one("--precision", "int8"))


@advice("run.generation require_weights text #5")
@advice("run.generation require_weights contradiction")
def _(w: World) -> None:
    w.fails(_round_weights(w, no_cache=True))
    w.right(_round_weights(w))


@advice("generation.weights require_rounded text")
@advice("targets.openvino.stateful require_integers text")
def _(w: World) -> None:
    from compressor.targets.openvino import session

    with w.patch.context() as patch:
        patch.setattr(session, "executed_layers", lambda compiled: [])
        w.fails_inside(_round_weights(w, target="openvino"))
        w.right(_round_weights(w, target="openvino", precision="fp32"))
        w.right(_round_weights(w, target="ort"))


@advice("engines.prove constant text")
@advice("engines.prove constant text #2")
def _(w: World) -> None:
    from compressor.engines.prove import require

    is_rounded = "--precision" in w.site.texts[0]
    stage = ProofStage.CACHED_WEIGHTS if is_rounded else ProofStage.CACHED_EXPORT
    w.fails(require, Proof(stage=stage, variant="compressed", error=1.0, tolerance=0.1, cases=("a batch",)))
    w.right(*w.keep_one(*(("--precision", "fp32") if is_rounded else ("--no-cache",))))


@advice("generation.weights Rounding.apply text")
def _(w: World) -> None:
    from compressor.generation.weights import Rounding
    from graph_passes import load
    from tests.generation.counting import write_decoder_only

    graph = load(write_decoder_only(w.file("counting")) / "decoder.onnx")
    w.fails(lambda: Rounding("int4w").apply(graph))
    w.right(lambda: Rounding().apply(graph))


@advice("generation.weights WeightTrials._notes text")
@advice("generation.weights WeightTrials._notes text #2")
def _(w: World) -> None:
    from compressor.generation.weights import Rounding, Trial, WeightTrials
    from compressor.targets import target

    rounding = Rounding("int4w")

    def notes(max_drop: float | None, *, holds: bool) -> list[Note]:
        row = rounding.row(target("ort")).model_copy(update={"holds": holds, "difference": -0.1})
        trials: Any = SimpleNamespace(scorer=SimpleNamespace(max_drop=max_drop))
        return WeightTrials._notes(trials, Trial(rounding, row))

    w.notes(lambda: notes(None, holds=True) if "has no bound" in w.site.texts[0] else notes(0.01, holds=False))
    w.right(lambda: notes(0.2, holds=True))
