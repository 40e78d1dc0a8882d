"""Advice about ONNX files that are compressed: see `tests.advice.world`."""

from __future__ import annotations

import numpy as np
import onnx
import torch
import transformers as hf

from tests import folders
from tests.advice.entries.conflicts import RULES, conflict
from tests.advice.world import World, advice
from tests.graph.files import LENGTH, arrays, classifier, halve, image_classifier, npz, write_graph
from tests.tasks import pictures

FILE = "dense.onnx -o out --data rows.tsv --macs 50% "
conflict(
    RULES + "name rule #2",
    FILE + "--attention sdpa",
    FILE,
    "model -o out --attention sdpa --data rows.tsv --macs 50%",
)
conflict(
    RULES + "tokenizer rule",
    "model -o out --data rows.tsv --macs 50% --tokenizer model",
    "model -o out --data rows.tsv --macs 50%",
)


def _run(w: World, graph: str, *flags: str, rows: str = "rows.npz") -> tuple[str, ...]:
    """A short run of a graph, beside which there is a file of arrays."""
    if not w.file("rows.npz").is_file():
        npz(w.file("rows.npz"), **arrays())
    return (graph, "-o", "out", "--data", rows, "--macs", "60%", "--batch", "1", "--seconds", "0.01", *flags)


@advice("graph.program _require_readable text", zoo=True)
def _(w: World) -> None:
    from onnxruntime.quantization import quantize_dynamic

    whole = classifier(w.file("graph/model.onnx"))
    quantize_dynamic(whole, w.file("quantized.onnx"))
    w.fails(*_run(w, "quantized.onnx"))
    w.right(*_run(w, "graph/model.onnx", "--precision", "int8"))


@advice("graph.source _require_processor file-missing #2")
def _(w: World) -> None:
    classifier(w.file("graph/model.onnx"))
    w.fails(*_run(w, "graph/model.onnx", rows="rows.tsv"))
    w.right(*_run(w, "graph/model.onnx", "--tokenizer", "model", rows="rows.tsv"))
    w.right(*_run(w, "graph/model.onnx"))


@advice("graph.source _require_processor unsupported-model")
def _(w: World) -> None:
    names = ("numbers", "mask")
    classifier(w.file("graph/model.onnx"), inputs=names)
    w.fails(*_run(w, "graph/model.onnx", rows="rows.tsv"))
    npz(w.file("numbers.npz"), **arrays(inputs=names))
    w.right(*_run(w, "graph/model.onnx", rows="numbers.npz"))


@advice("graph.source _require_processor unsupported-model #2")
def _(w: World) -> None:
    model = onnx.load(classifier(w.file("graph/model.onnx")))
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = LENGTH
    onnx.save(model, w.file("graph/model.onnx"))
    w.fails(*_run(w, "graph/model.onnx", "--tokenizer", "model", rows="rows.tsv"))
    w.right(*_run(w, "graph/model.onnx"))


@advice("graph.source _task_by_form unsupported-model", zoo=True)
def _(w: World) -> None:
    torch.manual_seed(0)
    model = hf.BertForMaskedLM(hf.BertConfig(**folders.SIZES))
    write_graph(model, w.file("graph/model.onnx"))
    w.rows("words.txt", *["good film bad plot one two"] * 24)
    w.fails(*_run(w, "graph/model.onnx", "--tokenizer", "model", rows="words.txt"))
    w.right(*_run(w, "graph/model.onnx", "--tokenizer", "model", "--task", "fill-mask", rows="words.txt"))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(w.file("graph"))
    w.right(*_run(w, "graph/model.onnx", "--tokenizer", "model", rows="words.txt"))


@advice("graph.source _require_processor file-missing", zoo=True)
def _(w: World) -> None:
    file = image_classifier(w.file("graph"), has_processor=False)
    pictures.write_folder(w.file("images"), 24)
    w.fails(*_run(w, "graph/model.onnx", rows="images"))
    npz(w.file("pixels.npz"), pixel_values=np.zeros((24, 3, pictures.SIZE, pictures.SIZE), np.float32))
    w.right(*_run(w, "graph/model.onnx", rows="pixels.npz"))
    image_classifier(file.parent)
    w.right(*_run(w, "graph/model.onnx", rows="images"))


@advice("graph.source load_graph contradiction", zoo=True)
def _(w: World) -> None:
    task = ("--task", "text-classification")
    classifier(w.file("graph/model.onnx"))
    w.fails(*_run(w, "graph/model.onnx", *task))
    w.right(*_run(w, "graph/model.onnx"))
    w.right(*_run(w, "graph/model.onnx", *task, "--tokenizer", "model", rows="rows.tsv"))


@advice("run.load load_model unsupported-model")
def _(w: World) -> None:
    whole = classifier(w.file("graph/model.onnx"))
    halve(whole, w.file("half.onnx"))
    w.fails(*_run(w, "half.onnx", "--precision", "int8"))
    w.right(*_run(w, "graph/model.onnx", "--precision", "int8"))
    w.right(*_run(w, "half.onnx"))
