"""Advice of the remaining modules: see `tests.advice.world`."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from compressor.config.run import Recipe
from compressor.config.step_list import step_of_flags
from compressor.config.steps import Blocks
from compressor.engines.prove import Case
from compressor.model_folder import load
from compressor.targets.caches import DECODER
from graph_passes import BlockMask, Plan, find_attention, save
from graph_passes.attention.match_plan import match_plan
from tests import language
from tests.advice.world import SHORT, World, advice
from tests.graph_passes.stacked_attention import keeping, stack
from tests.latency.graphs import softmax_graph
from tests.targets.graphs import parsed


def masked(w: World, *flags: Any) -> tuple[Any, ...]:
    """A run that drops blocks, which learns them without a graph."""
    w.learns()
    return w.run("--training-steps", "2", "--batch-size", "8", "--drop-blocks", "50%", *flags)


@advice("block_masks.attention_maps collect_attention_maps too-few-rows", zoo=True)
def _(w: World) -> None:
    from compressor.block_masks.attention_maps import _MapSums

    averages = _MapSums.averages
    w.patch.setattr(_MapSums, "averages", lambda self: ({}, {"site": np.zeros((2, 2))}, {}))
    w.fails(*masked(w))
    w.patch.setattr(_MapSums, "averages", averages)
    w.right(*masked(w))


@advice("block_masks.attention_maps _MapSums.start_batch too-long")
def _(w: World) -> None:
    import torch

    from compressor.block_masks.attention_maps import _MapSums
    from compressor.model_folder import example_inputs, load
    from compressor.units import find_sites

    folder = load(w.model)
    sites = find_sites(folder.model, example_inputs(folder, 1, 4))
    w.fails(lambda: _MapSums(folder.model, sites, 8).start_batch(torch.ones(1, 9), None))
    w.right(lambda: _MapSums(folder.model, sites, 9).start_batch(torch.ones(1, 9), None))


@advice("block_masks.attention_maps load_maps too-long")
def _(w: World) -> None:

    from compressor.block_masks import attention_maps

    length = 8
    maps = SimpleNamespace(length=length, check=lambda *_: None)
    w.patch.setattr(attention_maps, "AttentionMaps", SimpleNamespace(load=lambda path: maps))
    w.patch.setattr(attention_maps, "memory_length", lambda model: 0)
    file, anything = w.file("maps.safetensors"), SimpleNamespace()
    w.fails(attention_maps.load_maps, file, anything, (), 16)
    w.right(attention_maps.load_maps, file, anything, (), 8)
    maps.length = 16
    w.right(attention_maps.load_maps, file, anything, (), 16)


@advice("block_masks.attention_maps shares_by_kind unsupported-model")
def _(w: World) -> None:
    command = w.run("--training-steps", "2", "--drop-blocks-by-kind")
    w.fails(*command, "cross=50%")
    w.right(*command, "bidirectional=50%")


@advice("block_masks.mask_selector MaskSelector.select text")
def _(w: World) -> None:
    from compressor.block_masks.mask_selector import MaskSelector

    plan = Plan.load(w.file("plan.json"))
    masks = {plan.sites[0].name: BlockMask(np.ones((2, 1, 1), dtype=bool), 8)}
    w.patch.setattr(MaskSelector, "times", lambda self, site, mask: ())
    w.patch.setattr(MaskSelector, "_slow_size", lambda self, times: "1x8")

    def select(*, everywhere: bool) -> None:
        recipe = Recipe(model="model", data="rows.tsv", drop_blocks=0.5, block_size=8, mask_all_sites=everywhere)
        MaskSelector(recipe, (8,), 8, {}, blocks=step_of_flags(recipe, Blocks)).select(plan, masks)

    w.notes(lambda: select(everywhere=False))
    w.right(lambda: select(everywhere=True))


@advice("block_masks.attention_maps unreached_notes text", zoo=True)
def _(w: World) -> None:
    lines = [f"{n % 2}\t{' '.join(['good film'] * (n % 2 + 1))}" for n in range(48)]
    w.rows("rows.tsv", "label\ttext", *lines)
    w.notes(*masked(w, "--max-length", "20", "--block-size", "8"))
    w.right(*masked(w, "--max-length", "8", "--block-size", "8", "-o", "other"))


@advice("errors TargetMissingError.of_package text", unfollowed="installs a package")
def _(w: World) -> None:
    from compressor.errors import TargetMissingError

    def raise_error() -> NoReturn:
        raise TargetMissingError.of_package("ray", "distributed", "Ray is not installed")

    w.fails(raise_error)


@advice("measure.bench sized_feeds text")
def _(w: World) -> None:
    w.times_nothing()
    for name, length in (("fixed.onnx", "8"), ("free.onnx", "sequence")):
        body = parsed("y = Cast <to = 1> (ids)", f"int64[batch, {length}] ids", f"float[batch, {length}] y")
        save(body, w.file(name))
    bench = ("bench", "fixed.onnx", "fixed.onnx", "--batch", "1", "--seconds", "0.01", "--seq")
    w.fails(*bench, "16")
    w.right(*bench, "8")
    w.right("bench", "free.onnx", "free.onnx", *bench[3:], "16")


@advice("measure.bench sized_feeds code")
def _(w: World) -> None:
    w.times_nothing()
    body = parsed("y = Cast <to = 1> (ids)", "int64[2, sequence] ids", "float[2, sequence] y")
    save(body, w.file("fixed.onnx"))
    bench = ("bench", "fixed.onnx", "fixed.onnx", "--seq", "8", "--seconds", "0.01", "--batch")
    w.fails(*bench, "1")
    w.right(*bench, "2")


@advice("measure.bench require_run text", zoo=True)
def _(w: World) -> None:
    w.times_nothing()
    bench = ("bench", "dense.onnx", "dense.onnx", "--batch", "1", "--seconds", "0.01", "--seq")
    w.fails(*bench, "99")
    w.right(*bench, "8")


@advice("pytest_plugin split_options unknown-name")
def _(w: World) -> None:
    from compressor.pytest_plugin import split_options

    w.fails(split_options, {"model": "dense.onnx", "baselin": "dense.onnx"})
    w.right(split_options, {"model": "dense.onnx", "baseline": "dense.onnx"})


def quantized(w: World) -> Any:
    """The file of a graph with a quantized product."""
    body = (
        "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) v = DequantizeLinear (w, s, n) y = MatMul (d, v)"
    )
    weights = "float s = {0.1}, int8 z = {0}, int8 n = {0}, int8[4, 3] w"
    save(parsed(body, "float[B, 4] x", "float[B, 3] y", weights), w.file("quantized.onnx"))
    return w.file("quantized.onnx")


@advice("quantization.portable float_model text")
def _(w: World) -> None:
    from compressor.quantization.portable import float_model

    w.fails(float_model, quantized(w))
    w.right(float_model, softmax_graph(w.file("small.onnx")))


@advice("quantization.portable inputs_of text")
def _(w: World) -> None:
    from compressor.quantization.portable import inputs_of
    from graph_passes import load

    graph = softmax_graph(w.file("small.onnx"))
    w.fails(inputs_of, load(graph), [], graph)
    w.right(inputs_of, load(graph), [{"x": np.ones((1, 4), np.float32)}], graph)
    w.right("model", "--plan", "plan.json", "--precision", "int8", "--data", "rows.tsv", "-o", "out")


@advice("quantization.portable quantize_graph text")
def _(w: World) -> None:
    nncf = pytest.importorskip("nncf")
    from compressor.quantization.portable import quantize_graph

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("no luck")

    w.patch.setattr(nncf, "quantize", refuse)
    rows = [{"x": np.ones((1, 4), np.float32)}]
    w.fails(lambda: quantize_graph(softmax_graph(w.file("small.onnx")), rows, w.file("int8.onnx")))
    w.right(*w.run("--plan", "plan.json", "--precision", "fp32"))


@advice("quantization.symmetric quantize_symmetric unsupported-model")
def _(w: World) -> None:
    from compressor.quantization.symmetric import quantize_symmetric

    save(parsed("y = Relu (x)", "float[B, 4] x", "float[B, 4] y"), w.file("small.onnx"))
    rows = [{"x": np.ones((1, 4), np.float32)}]
    w.fails(lambda: quantize_symmetric(w.file("small.onnx"), rows, w.file("int8.onnx")))
    w.right(*w.run("--plan", "plan.json", "--precision", "fp16", "--target", "trt"))


@advice("report.frontier read_points text")
def _(w: World) -> None:
    w.rows("points.json", "[]")
    command = w.run("--macs", "80%,60%", "--compare-points")
    w.fails(*command, "nowhere.json")
    w.right(*command, "points.json")


@advice("report.files load text", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    (run / "report.json").write_text("{}")
    w.fails("report", run)
    w.whole()
    w.right(*w.run("--plan", "plan.json"))
    w.right("report", w.out)


def training(w: World, *flags: Any) -> tuple[Any, ...]:
    from tests.cli.test_language_models import TINY

    w.file("train.txt").write_text(language.text(30))
    return ("train", "trained", "--data", "train.txt", *TINY.split(), *flags)


@advice("training.checkpoints _settings_differ_error run-differs", zoo=True)
def _(w: World) -> None:
    with w.patch.context() as patch:  # a training that is interrupted after its last checkpoint
        patch.setattr("compressor.training.train._evaluate", w.stop)
        w.right(*training(w))
    w.fails(*training(w, "--learning-rate", "0.123"))
    w.right(*training(w))
    w.right("train", "another", *training(w, "--learning-rate", "0.123")[2:])
    w.right(*training(w, "--learning-rate", "0.123", "--force"))


@advice("training.train constant text", zoo=True)
def _(w: World) -> None:
    w.fails(*training(w, "--learning-rate", "1e30", "--warmup", "0"))
    w.right(*training(w, "--learning-rate", "1e-4", "--force"))


@advice("training.train _prepare text", zoo=True)
def _(w: World) -> None:
    command = training(w)
    w.notes(*command, "--eval-data", "train.txt")
    w.right("train", "another", *command[2:], "--eval-data", "train.txt", "--test-data", "train.txt")


@advice("training.fit constant text", zoo=True)
def _(w: World) -> None:
    w.learns()
    w.fails(*w.keep_one("--learning-rate", "1e30", "--batch-size", "8", "--options", "warmup=0"))
    w.right(*w.keep_one("--learning-rate", "1e-4", "--batch-size", "8", "--force"))


@advice("workdir WorkDir.reserve disk-full")
def _(w: World) -> None:
    from compressor import workdir

    w.patch.setattr(
        workdir.shutil, "disk_usage", lambda path: SimpleNamespace(free=8 if "full" in str(path) else 1 << 40)
    )
    w.fails(*w.keep_one("-o", w.file("full")))
    w.right(*w.keep_one("-o", w.file("empty")))


@advice("workdir open_workdir invalid-value")
def _(w: World) -> None:
    w.fails(*w.keep_one("-o", "/"))
    w.right(*w.keep_one("-o", "out"))


@advice("workdir open_workdir file-unwritable")
def _(w: World) -> None:
    w.rows("file", "")
    w.fails(*w.keep_one("-o", "file/out"))
    w.right(*w.keep_one("-o", "folder/out"))


@advice("workdir _check_output text")
def _(w: World) -> None:
    from compressor.workdir import _LADDER

    w.rows(f"out/{_LADDER}", "")
    w.fails(*w.keep_one("--force"))
    w.right(*w.keep_one("-o", "another"))


@advice("workdir _check_output text #2")
def _(w: World) -> None:
    w.rows("out/letter.txt", "")
    w.fails(*w.keep_one("--force"))
    w.right(*w.keep_one("-o", "another"))


@advice("workdir _check_output text #3", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    w.fails(*w.keep_one("-o", run))
    w.right(*w.keep_one("-o", run, "--force"))
    w.right(*w.keep_one("-o", "another"))


@advice("workdir _check_output output-exists", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    w.fails(*w.keep_one("-o", run))
    w.right(*w.keep_one("-o", "another"))


@advice("workdir _check_work_folder output-exists")
def _(w: World) -> None:
    w.rows("out.partial/letter.txt", "")
    w.fails(*w.keep_one())
    w.right(*w.keep_one("-o", "another"))
    shutil.move("out.partial", "moved")
    w.right(*w.keep_one())


@advice("workdir locked folder-busy")
def _(w: World) -> None:
    from compressor.workdir import open_workdir

    with open_workdir(w.out, force=False):
        w.fails(*w.keep_one())
        w.right(*w.keep_one("-o", "another"))
    w.right(*w.keep_one())


@advice("graph_passes.passes.insert_gates _check_masks mask-missing")
def _(w: World) -> None:
    masks(w)
    w.fails_inside("apply", "dense.onnx", "--plan", "plan.json", "-o", "smaller.onnx")
    w.right("model", "--plan", "plan.json", "--max-length", "8", "--seq", "8", "-o", "out")


def masks(w: World) -> None:
    plan = Plan.load(w.file("plan.json"))
    mask = BlockMask(np.ones((plan.sites[0].heads, 1, 1), dtype=bool), 8)
    plan.masked({site.name: mask for site in plan.sites}).save(w.file("plan.json"))


@advice("graph_passes.passes.lower_opset LowerOpset.call unsupported-opset")
def _(w: World) -> None:
    from graph_passes import load
    from graph_passes.passes.lower_opset import LowerOpset

    graph = load(w.file("dense.onnx"))
    graph.opset_imports[""] = 20
    w.fails(LowerOpset(), graph)
    graph.opset_imports[""] = 18
    w.right(LowerOpset(), graph)
    w.right(*w.run("--plan", "plan.json", "--opset", "18"))


@advice("graph_passes.attention.match_plan constant text")
def _(w: World) -> None:
    attentions = find_attention(stack("layer.0.attention", "layer.1.attention"))
    w.fails(match_plan, Plan(sites=(keeping(2, name="another"),)), attentions)
    named = tuple(keeping(2, name=str(attention.name)) for attention in attentions)
    w.right(match_plan, Plan(sites=named), attentions)
    w.right("sites", "dense.onnx")


@advice("tasks.causal_lm Streams text", zoo=True)
def _(w: World) -> None:
    from compressor.tasks.causal_lm import Streams

    (part,) = w.site.texts
    assert part in Streams._remedy
    w.provoked += 1
    w.right(*training(w, "--vocabulary", "40"))


@advice("targets.onnxruntime.sessions OrtSessions.decode text")
def _(w: World) -> None:
    from compressor.targets.onnxruntime.sessions import OrtSessions

    folder = _grouped_decoder(w)
    model = load(folder / "model.onnx", tokenizer=w.model).model
    save(model.with_weights(with_caches=True), folder / DECODER)
    sessions, ids, mask = OrtSessions(folder, optimized=False), np.array([[5, 6], [7, 8]]), np.array([[0, 1], [1, 1]])
    w.fails(lambda: sessions.decode(ids, mask, None, sessions.start(2)))
    w.right(lambda: sessions.decode(ids[1:], mask[1:], None, sessions.start(1)))


@advice("generation.export_file prove_export text")
def _(w: World) -> None:
    from compressor.generation import export_file
    from compressor.units import keep_all

    file = _grouped_decoder(w) / "model.onnx"
    folder = load(file, tokenizer=w.model)
    plan, ids = keep_all(folder.access.groups({}, "eager")), np.array([[5, 6, 7]])
    texts = [Case({"input_ids": ids, "attention_mask": np.ones_like(ids)}, "text")]
    zeros = {"logits": np.zeros((1, 3, 25), np.float32)}
    w.patch.setattr(export_file, "run_in_steps", lambda sessions, feeds: zeros)
    w.fails(lambda: export_file.prove_export(folder, plan, texts, file.parent, "eager", "dense"))
    rows = w.rows("lines.txt", *["good film plot"] * 40)
    w.right(file, "--tokenizer", w.model, "--data", rows, "--macs", "70%", "--no-cache", *SHORT, "-o", w.out)


def _grouped_decoder(w: World) -> Path:
    """A folder with the file of a decoder that reads no padding on the left."""
    from tests.graph.decoders import build_grouped

    folder = w.file("decoder")
    folder.mkdir()
    return build_grouped(folder / "model.onnx").parent
