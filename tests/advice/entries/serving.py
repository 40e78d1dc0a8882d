"""Advice of `serving`: see `tests.advice.world`."""

from __future__ import annotations

from typing import Any

import pytest

from compressor.targets.graph_facts import graph_digest
from tests.advice.world import World, advice

pytest.importorskip("tritonclient.grpc")

from tests.serving.outputs import run_folder, tensorrt_engine

GPU = "needs a GPU and TensorRT"


def export(w: World, run: Any, *flags: Any) -> tuple[Any, ...]:
    return ("export-triton", run, "-o", w.file("repository"), *flags)


def served(w: World) -> Any:
    """The folder of a run with a small graph of texts."""
    return run_folder(w.file("served"))


@advice("serving.model_files _graph_files text", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    (run / "engine.onnx").unlink()
    w.fails(*export(w, run))
    w.right("build", run, "--seconds", "0.01", "--threads", "1")
    w.right(*export(w, run))


@advice("serving.model_files _openvino_files contradiction", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    w.right("build", run, "--target", "openvino", "--seconds", "0.01", "--threads", "1")
    for flags in (("--device", "gpu"), ("--gpus", "0")):
        w.fails(*export(w, run, "--backend", "python", *flags, "--force"))
        w.right(*export(w, run, "--backend", "python", "--force"))
        w.right(*export(w, run, "--backend", "onnxruntime", *flags, "--force"))


@advice("serving.model_files _generating_files contradiction")
def _(w: World) -> None:
    from tests.generation.counting import write_decoder_only

    run = write_decoder_only(served(w))
    w.fails(*export(w, run, "--max-batch", "4"))
    w.right(*export(w, run))
    w.right(*export(w, run, "--backend", "onnxruntime", "--max-batch", "4", "--force"))


@advice("targets.onnxruntime.sessions choose_file contradiction")
def _(w: World) -> None:
    from compressor.generation.weights import Rounding
    from compressor.targets.caches import DECODER
    from compressor.targets.onnxruntime.sessions import engine_of
    from graph_passes import load, save
    from graph_passes.passes import FuseForOrt, Normalize
    from tests.generation.counting import write_decoder_only
    from tests.generation.exported import exported

    run = write_decoder_only(served(w))
    engine = FuseForOrt(in_place=True)(Normalize()(load(exported("gpt2") / DECODER))).model
    save(Rounding("int4w").apply(engine.clone()), engine_of(run / DECODER))
    for flags in (("--device", "gpu"), ("--gpus", "0")):
        w.fails(*export(w, run, *flags, "--force"))
        w.right(*export(w, run, "--force"))
        w.right(*export(w, run, *flags, "--plain", "--force"))
    save(engine, engine_of(run / DECODER))
    w.right(*export(w, run, "--device", "gpu", "--force"))


@advice("serving.model_files _max_batch out-of-range")
def _(w: World) -> None:
    run = built(w)
    w.fails(*export(w, run, "--backend", "tensorrt", "--max-batch", "64"))
    w.right(*export(w, run, "--backend", "tensorrt", "--max-batch", "16"))
    tensorrt_engine(run, (8, 0), 64, graph_hash=graph_digest(run / "model.onnx"))
    w.right(*export(w, run, "--backend", "tensorrt", "--max-batch", "64", "--force"))


@advice("serving.model_files _max_batch contradiction")
def _(w: World) -> None:
    from types import SimpleNamespace

    from compressor.serving.model_files import _max_batch

    fixed: Any = SimpleNamespace(has_batch=False)
    request: Any = SimpleNamespace(max_batch=8, out="out")
    w.fails(_max_batch, request, [fixed], 1)
    w.right(_max_batch, SimpleNamespace(max_batch=None, out="out"), [fixed], 1)


@advice("serving.model_files _limits engine-missing", unfollowed=GPU)
def _(w: World) -> None:
    import json

    run = served(w)
    report = json.loads((run / "report.json").read_text())
    report["recipe"].update(target="trt")
    (run / "report.json").write_text(json.dumps(report))
    w.notes(*export(w, run))


@advice("serving.repository _notes text")
def _(w: World) -> None:
    run = served(w)
    w.notes(*export(w, run))
    w.right(*export(w, run, "--storage-uri", "s3://models", "--force"))


@advice("serving.repository _check_output text")
def _(w: World) -> None:
    run = served(w)
    w.rows("repository", "")
    w.fails(*export(w, run))
    w.right("export-triton", run, "-o", "another")


@advice("serving.repository _check_output text #2")
def _(w: World) -> None:
    run = served(w)
    w.right(*export(w, run, "--name", "small"))
    w.fails(*export(w, run, "--name", "small"))
    w.right(*export(w, run, "--name", "small", "--force"))
    w.right(*export(w, run, "--name", "another"))


@advice("serving.repository _check_output text #3")
def _(w: World) -> None:
    run = served(w)
    w.rows("repository/small/letter.txt", "")
    w.fails(*export(w, run, "--name", "small", "--force"))
    w.right(*export(w, run, "--name", "another", "--force"))


def built(w: World) -> Any:
    """The folder of a run with an engine for compute capability 8.0."""
    run = served(w)
    tensorrt_engine(run, (8, 0), 32, graph_hash=graph_digest(run / "model.onnx"))
    return run


@advice("serving.tensorrt_engines check_request text")
def _(w: World) -> None:
    run = built(w)
    w.fails(*export(w, run, "--backend", "tensorrt", "--device", "cpu"))
    w.right(*export(w, run, "--backend", "tensorrt"))
    w.right(*export(w, run, "--backend", "onnxruntime", "--device", "cpu", "--force"))


@advice("serving.tensorrt_engines check_request text #4")
def _(w: World) -> None:
    run = built(w)
    for flags in (("--plain",), ("--threads", "2")):
        w.fails(*export(w, run, "--backend", "tensorrt", *flags, "--force"))
        w.right(*export(w, run, "--backend", "tensorrt", "--force"))
        w.right(*export(w, run, "--backend", "onnxruntime", *flags, "--force"))


@advice("serving.tensorrt_engines check_request text #2")
def _(w: World) -> None:
    run = built(w)
    w.fails(*export(w, run, "--backend", "tensorrt", "--plain"))
    w.right(*export(w, run, "--backend", "onnxruntime", "--plain"))


@advice("serving.tensorrt_engines check_request text #3")
def _(w: World) -> None:
    run = built(w)
    w.fails(*export(w, run, "--backend", "tensorrt", "--threads", "2"))
    w.right(*export(w, run, "--backend", "onnxruntime", "--threads", "2"))


@advice("serving.tensorrt_engines load_engines file-missing")
def _(w: World) -> None:
    run = served(w)
    w.fails(*export(w, run, "--backend", "tensorrt"))
    w.right(*export(w, run, "--backend", "onnxruntime"))


@advice("serving.tensorrt_engines load_engines file-mismatch", unfollowed=GPU)
def _(w: World) -> None:
    run = served(w)
    tensorrt_engine(run, (8, 0), 32, graph_hash="sha256:0")
    w.fails(*export(w, run, "--backend", "tensorrt"))


def conflict(w: World, capability: tuple[int, int] = (9, 0), **fields: Any) -> tuple[Any, Any]:
    """A run with an engine, and an engine for another GPU with other fields."""
    run = built(w)
    digest = graph_digest(run / "model.onnx")
    return run, tensorrt_engine(w.file("other"), capability, 32, graph_hash=digest, **fields)


def follow_conflict(w: World, run: Any, engine: Any) -> None:
    """Two engines cannot share a model, and two that agree can."""
    command = export(w, run, "--backend", "tensorrt", "--engine", engine)
    w.fails(*command)
    digest = graph_digest(run / "model.onnx")
    w.right(*export(w, run, "--engine", tensorrt_engine(w.file("right"), (9, 0), 32, graph_hash=digest)))


@advice("serving.tensorrt_engines _check_combination text")
def _(w: World) -> None:
    run, engine = conflict(w, (8, 0))
    follow_conflict(w, run, engine)
    w.right(*export(w, run, "--force"))


@advice("serving.tensorrt_engines _check_combination text #2")
def _(w: World) -> None:
    run, engine = conflict(w, profiles=profiles(64, 128, 128))
    follow_conflict(w, run, engine)


@advice("serving.tensorrt_engines _check_combination text #3")
def _(w: World) -> None:
    run, engine = conflict(w, profiles=profiles(64, 128, 128))
    follow_conflict(w, run, engine)


def profiles(smallest: int, usual: int, largest: int) -> dict[str, Any]:
    names = ("input_ids", "attention_mask")
    return dict.fromkeys(names, ((1, smallest), (8, usual), (32, largest)))


@advice("serving.tensorrt_engines _check_same_server text")
def _(w: World) -> None:
    run, engine = conflict(w, tensorrt="10.1.0")
    follow_conflict(w, run, engine)


@advice("serving.tensorrt_engines _check_same_server text #2")
def _(w: World) -> None:
    run, engine = conflict(w, precision="fp32")
    follow_conflict(w, run, engine)


@advice("serving.tensorrt_engines _check_same_server text #3")
def _(w: World) -> None:
    run, engine = conflict(w, profiles=profiles(128, 128, 128))
    follow_conflict(w, run, engine)
