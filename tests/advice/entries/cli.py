"""Advice of `cli`: see `tests.advice.world`."""

from __future__ import annotations

import shutil

from tests.advice.world import World, advice
from tests.cli.conftest import drop_first_head


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


@advice("cli.bench _bench_folder contradiction")
def _(w: World) -> None:
    bench = ("--seconds", "0.01", "--seq", "8", "--batch", "1")
    run = w.finished()
    w.fails("bench", run, "--provider", "cpu", *bench)
    w.right("bench", run, *bench)
    w.right("bench", "dense.onnx", "dense.onnx", "--provider", "cpu", *bench)


@advice("cli.bench _bench_graphs contradiction")
def _(w: World) -> None:
    bench = ("bench", "dense.onnx", "dense.onnx", "--seconds", "0.01", "--seq", "8", "--batch", "1")
    w.fails(*bench, "--target", "ort,openvino")
    w.right(*bench, "--target", "ort")
    w.fails(*bench, "--callers", "2")
    w.right(*bench)


@advice("cli.check _check_path contradiction")
def _(w: World) -> None:
    w.fails("check", "dense.onnx", "--model", "dense.onnx", "--baseline", "dense.onnx", "--inputs", "rows.tsv")
    size = ("--seq", "8", "--batch", "1", "--seconds", "0.01", "--max-slowdown", "1000%")
    w.right("check", "dense.onnx", "--baseline", "dense.onnx", *size)
    w.clear("server-unreachable", "check", "--server", "http://127.0.0.1:9", "--model", "dense", "--baseline", "dense")


@advice("cli.costs _output_file invalid-value")
def _(w: World) -> None:
    costs = ("costs", "model", "--seq", "8", "--batch", "1")
    w.patch.setattr("compressor.run.pruning.model_costs.measure_costs", w.stop)
    w.fails(*costs, "--out", "costs.txt")
    w.right(*costs, "--out", "costs.html")


@advice("cli.field_options _renamed.refuse renamed")
def _(w: World) -> None:
    w.fails(*w.run("--keep", "1", "--guarantee", "0.9"))
    w.clear("contradiction", *w.run("--keep", "1", "--certify", "0.9"))
    w.fails(*w.run("--keep", "1", "--blocks", "20%"))
    w.right(*w.run("--keep", "1", "--drop-blocks", "20%"))


@advice("cli.output_file check_output_file invalid-value")
def _(w: World) -> None:
    w.fails("apply", "dense.onnx", "--plan", "plan.json", "-o", "model")
    w.right("apply", "dense.onnx", "--plan", "plan.json", "-o", "model/smaller.onnx")


@advice("cli.output_file check_output_file file-missing")
def _(w: World) -> None:
    w.fails("apply", "dense.onnx", "--plan", "plan.json", "-o", "nowhere/smaller.onnx")
    w.right("apply", "dense.onnx", "--plan", "plan.json", "-o", "smaller.onnx")
    w.file("nowhere").mkdir()
    w.right("apply", "dense.onnx", "--plan", "plan.json", "-o", "nowhere/smaller.onnx")


@advice("cli.output_file check_output_file output-exists")
def _(w: World) -> None:
    command = ("apply", "dense.onnx", "--plan", "plan.json", "-o")
    w.file("smaller.onnx").touch()
    w.fails(*command, "smaller.onnx")
    w.right(*command, "smaller.onnx", "--force")
    w.right(*command, "another.onnx")


@advice("cli.recipe _print_options unknown-name")
def _(w: World) -> None:
    w.fails("recipe", "--options", "dps")
    w.right("recipe", "--options", "dsp")


@advice("cli.run run contradiction")
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


@advice("cli.study study unknown-name")
def _(w: World) -> None:
    w.fails("study", "grid", "model", "--size", "smal", "--data", "rows.tsv")
    w.patch.setattr("compressor.studies.study", w.stop)
    w.right("study", "grid", "model", "--size", "small", "--data", "rows.tsv")
