"""Advice of `cli`: see `tests.advice.world`."""

from __future__ import annotations

import io
import shutil
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from compressor.config.run import Recipe
from tests.advice.world import World, advice
from tests.cli.conftest import drop_first_head
from tests.generation.counting import write_decoder_only


def smaller(w: World) -> None:
    """Let the plan of the inputs drop a head."""
    from graph_passes import Plan

    drop_first_head(Plan.load(w.file("plan.json"))).save(w.file("plan.json"))


@advice("cli.apply apply contradiction")
def _(w: World) -> None:
    smaller(w)
    shutil.copy("plan.json", "plan.onnx")
    w.fails("apply", "dense.onnx", "--plan", "plan.onnx", "-o", "plan.onnx", "--force")
    w.right("apply", "dense.onnx", "--plan", "plan.onnx", "-o", "smaller.onnx")


@advice("cli.bench _refuse contradiction", zoo=True)
def _(w: World) -> None:
    bench = ("--seconds", "0.01", "--seq", "8", "--batch", "1")
    run = w.finished()
    w.fails("bench", run, "--provider", "cpu", *bench)
    w.right("bench", run, *bench)
    w.right("bench", "dense.onnx", "dense.onnx", "--provider", "cpu", *bench)


@advice("cli.bench bench text")
def _(w: World) -> None:
    w.times_nothing()
    flags = ("--seconds", "0.01", "--batch", "1")
    w.fails("bench", "dense.onnx", "dense.onnx", "--new-tokens", "8", *flags)
    w.right("bench", "dense.onnx", "dense.onnx", "--seq", "8", *flags)
    folder = write_decoder_only(w.file("generating"))
    w.right("bench", folder, "--new-tokens", "8", "--prompt-tokens", "4", *flags)


@advice("cli.bench bench text #2")
def _(w: World) -> None:
    bench = ("bench", write_decoder_only(w.file("generating")), "--seconds", "0.01", "--batch", "1")
    w.fails(*bench, "--prompt-tokens", "4", "--target", "openvino")
    w.right(*bench, "--prompt-tokens", "4")


@advice("cli.bench _bench_graphs contradiction")
def _(w: World) -> None:
    w.times_nothing()
    bench = ("bench", "dense.onnx", "dense.onnx", "--seconds", "0.01", "--seq", "8", "--batch", "1")
    w.fails(*bench, "--target", "ort,openvino")
    w.right(*bench, "--target", "ort")
    w.fails(*bench, "--callers", "2")
    w.right(*bench)


@advice("cli.check _check_path contradiction")
def _(w: World) -> None:
    w.fails("check", "dense.onnx", "--model", "dense.onnx", "--baseline", "dense.onnx", "--inputs", "rows.tsv")
    w.clear("server-unreachable", "check", "--server", "http://127.0.0.1:9", "--model", "dense", "--baseline", "dense")
    w.patch.setattr("compressor.latency.check", w.stop)
    w.right("check", "dense.onnx", "--baseline", "dense.onnx")


@advice("cli.sites _output_file invalid-value")
def _(w: World) -> None:
    costs = ("costs", "model", "--seq", "8", "--batch", "1")
    w.patch.setattr("compressor.run.model_units.measure_costs", w.stop)
    w.fails(*costs, "--out", "costs.txt")
    w.right(*costs, "--out", "costs.html")


@advice("cli.commands check_output_file invalid-value")
def _(w: World) -> None:
    w.fails("apply", "dense.onnx", "--plan", "plan.json", "-o", "model")
    w.right("apply", "dense.onnx", "--plan", "plan.json", "-o", "model/smaller.onnx")


@advice("cli.commands check_output_file file-missing")
def _(w: World) -> None:
    w.fails("apply", "dense.onnx", "--plan", "plan.json", "-o", "nowhere/smaller.onnx")
    w.right("apply", "dense.onnx", "--plan", "plan.json", "-o", "smaller.onnx")
    w.file("nowhere").mkdir()
    w.right("apply", "dense.onnx", "--plan", "plan.json", "-o", "nowhere/smaller.onnx")


@advice("cli.commands check_output_file output-exists")
def _(w: World) -> None:
    command = ("apply", "dense.onnx", "--plan", "plan.json", "-o")
    w.file("smaller.onnx").touch()
    w.fails(*command, "smaller.onnx")
    w.right(*command, "smaller.onnx", "--force")
    w.right(*command, "another.onnx")


@advice("cli.run _print_options unknown-name")
def _(w: World) -> None:
    w.fails("recipe", "--options", "dps")
    w.right("recipe", "--options", "dsp")


@advice("cli.run _recipes contradiction")
def _(w: World) -> None:
    from compressor.config.methods import PENALISED_METHODS

    w.fails(*w.keep_one("--method", "dsp", "--lambda", "0.1"))
    w.right(*w.keep_one("--method", "dsp"))
    for method in PENALISED_METHODS:
        w.right(*w.keep_one("--method", method, "--lambda", "0.1"))


@advice("cli.sites sites contradiction")
def _(w: World) -> None:
    w.fails("sites", "dense.onnx", "--task", "text-classification")
    w.right("sites", "dense.onnx")


@advice("cli.sites _require_groups text")
def _(w: World) -> None:
    import numpy as np

    from graph_passes import save
    from tests.graph_passes.image_layer import SHAPE, image_layer

    save(image_layer(), w.file("image.onnx"))
    np.savez(w.file("rows.npz"), x=np.zeros(SHAPE, np.float32))
    w.fails("sites", "image.onnx")
    w.right("sites", "image.onnx", "--inputs", "rows.npz")


@advice("cli message_of text")
def _(w: World) -> None:
    w.usage_fails("apply", "--no-such-flag")
    w.right("apply", "--help")


@advice("cli message_of text #2")
def _(w: World) -> None:
    from compressor.run import pipeline

    load = pipeline.load_context

    def limited(recipe: Recipe, *arguments: Any) -> Any:
        if recipe.selection.batch_size > 4 or max(recipe.measure.batch) > 1:
            raise MemoryError
        return load(recipe, *arguments)

    w.patch.setattr(pipeline, "load_context", limited)
    w.usage_fails(*w.keep_one("--batch-size", "8"))
    w.right(*w.keep_one("--batch-size", "4"))
    w.usage_fails(*w.keep_one("--batch-size", "4", "--batch", "8"))
    w.right(*w.keep_one("--batch-size", "4", "--batch", "1"))


@advice("cli message_of text #3")
def _(w: World) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("a fault of the program")

    w.patch.setattr("compressor.run.pipeline._refuse_inputs_inside_output", fail)
    w.usage_fails(*w.keep_one())
    with pytest.raises(AssertionError):  # the same end, with the traceback
        w.right(*w.keep_one("--debug"))
    w.followed += 1


@advice("cli.run finish metric-fell")
def _(w: World) -> None:
    from compressor.cli.console import Console
    from compressor.cli.run import finish
    from compressor.results import DropStatus
    from tests.report import reports

    console = Console()
    console.quiet = True
    report = reports.report(recipe={"max_drop": 0.01}, drop_status=DropStatus.FAILED)
    w.fails(finish, console, report, w.out)
    w.right(finish, console, report.model_copy(update={"drop_status": DropStatus.PASSED}), w.out)


@advice("cli.run finish_ladder metric-fell")
def _(w: World) -> None:
    from compressor.cli.console import Console
    from compressor.cli.run import finish_ladder

    w.patch.setattr("compressor.report.terminal.frontier_summary", lambda frontier: "")
    console = Console()
    frontier: Any = SimpleNamespace(is_missed=True, sentence="no rung holds", missing=None, model_dump=lambda mode: {})
    w.fails(finish_ladder, console, frontier, w.out)
    frontier.is_missed = False
    w.right(finish_ladder, console, frontier, w.out)


@advice("cli.deploy kernel text", zoo=True)
def _(w: World) -> None:
    from tests.targets.kernels import HEADERS, compiled

    compiled()
    command = ("kernel", "-o", "kernel.so", *(() if HEADERS is None else ("--include", HEADERS)))
    w.right(*command)
    w.right(*w.run("--plan", "plan.json", "--kernel", "kernel.so"))
    w.provoked += 1  # the text is the result of the command


@advice("cli.language_models _prompts missing-value")
def _(w: World) -> None:
    from tests.generation.counting import write_decoder_only

    folder = write_decoder_only(w.file("counting"))
    w.patch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    w.fails("generate", folder)
    w.right("generate", folder, "--prompt", "one")
    w.patch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"one")))
    w.right("generate", folder)
