"""Compare MiniLM as people run it today with what `compress` makes of it, in one table and one picture.

    python -m benchmarks.rivals sst2                                  # every row; finished rows are not repeated
    python -m benchmarks.rivals sst2 --rows openvino-int8 distilled   # some rows
    python -m benchmarks.rivals sst2 --picture rivals.png             # and the picture

Each row is made once, in a folder of `--out`/SET/rivals, and measured in processes of its own: the metric on test rows
with a paired 95% interval of the difference from the whole model, the time of a call in turn with ONNX Runtime's own
fused fp32 engine at batch 1 and 8, the size of its files, and the memory that loading and running it adds to a process.
A row that this machine cannot make says why, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from matplotlib.figure import Figure
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from benchmarks.machine import machine
from benchmarks.quantization import SETS, reference_engine, rows_file, run, starting_model
from benchmarks.speed import table
from compressor.config.run import Recipe
from compressor.config.sections import RowsConfig
from compressor.measure import paired_interval
from compressor.measure.timing import alternate_calls
from compressor.model_folder import example_inputs, load
from compressor.silence_libraries import quiet_transformers
from compressor.targets import cores, target
from compressor.tasks import open_data, statistics
from compressor.units import find_sites, keep_all

SECONDS = 4.0
"""Time spent on each pair of engines at each batch size."""
STEPS = 1500
"""Steps of every distillation."""
Feeds = Mapping[str, np.ndarray]
Predict = Callable[[Feeds], np.ndarray]
"""Logits of one batch."""


@dataclass(frozen=True)
class Rival:
    """A row of the table.

    Attributes:
        title: what it is, for readers.
        fields: fields of the recipe of its run; None: it is made without a run.
        make: what comes before the run, or replaces it; returns further fields of the recipe.
        backend: `engine` loads the engine of the folder; `pytorch` and `compiled` load the model folder.
    """

    title: str
    fields: Mapping[str, Any] | None = None
    make: Callable[[str, Path, Path], dict[str, Any]] | None = None
    backend: Literal["engine", "pytorch", "compiled"] = "engine"

    @property
    def file(self) -> str:
        """The file of the engine."""
        return target(str((self.fields or {}).get("target", "ort"))).engine_file


def quantize_weights(name: str, root: Path, out: Path) -> dict[str, Any]:
    """ONNX Runtime's dynamic quantization of its fused graph, as its documentation recommends."""
    reference = reference_engine(starting_model(name, root), SETS[name].max_length, root)
    out.mkdir(parents=True, exist_ok=True)
    extra = {"DefaultTensorType": 1}
    quantize_dynamic(reference, out / "engine.onnx", per_channel=True, weight_type=QuantType.QInt8, extra_options=extra)
    return {}


def drop_layers(name: str, root: Path, out: Path) -> dict[str, Any]:
    """Every second layer of the model, as DistilBERT is initialized; it is distilled by the run that follows."""
    student, model = out.with_name("every-second-layer"), starting_model(name, root)
    if not (student / "plan.json").is_file():
        with quiet_transformers():
            network = AutoModelForSequenceClassification.from_pretrained(model)
            layers = network.bert.encoder.layer
            network.bert.encoder.layer = torch.nn.ModuleList(layers[::2])
            network.config.num_hidden_layers = len(layers[::2])
            network.save_pretrained(student)
            AutoTokenizer.from_pretrained(model).save_pretrained(student)
        folder = load(student)
        keep_all(find_sites(folder.model, example_inputs(folder, 2, 8))).save(student / "plan.json")
    return {"model": student, "teacher": model, "hidden_weight": 0.0}


INT8 = {"target": "openvino", "precision": "int8"}
OURS = {"distill": True, "distill_steps": STEPS}
RIVALS = {
    "pytorch": Rival("PyTorch, eager", backend="pytorch"),
    "compiled": Rival("PyTorch, torch.compile, frozen", backend="compiled"),
    "ort-fp32": Rival("ONNX Runtime, fp32, fused", {"keep_unread_positions": True}),
    "ort-dynamic": Rival("ONNX Runtime, dynamic int8 of the fused graph", make=quantize_weights),
    "ort-int8": Rival("ONNX Runtime, best int8 of compress", {"precision": "int8", "keep": "100%"}),
    "openvino-fp32": Rival("OpenVINO, fp32", {"target": "openvino", "keep_unread_positions": True}),
    "openvino-int8": Rival(
        "OpenVINO, int8 by NNCF, fixed shape", {**INT8, "keep": "100%", "keep_unread_positions": True}
    ),
    "dsp": Rival("half of the heads (DSP), int8", {**INT8, "method": "dsp", "keep": 36, "epochs": 1}),
    "fisher": Rival("Kwon et al., half of the MACs, int8", {**INT8, "method": "fisher", "macs": 0.5}),
    "layers": Rival("every second layer, distilled, int8", {**INT8, **OURS}, drop_layers),
    "pruned-fp32": Rival("compress, half of the MACs, fp32", {"macs": 0.5}),
    "pruned": Rival("compress, half of the MACs, int8", {**INT8, "macs": 0.5}),
    "distilled-fp32": Rival("compress, a quarter of the MACs, distilled, fp32", {"macs": 0.25, **OURS}),
    "distilled": Rival("compress, a quarter of the MACs, distilled, int8", {**INT8, "macs": 0.25, **OURS}),
    "distilled-sixth": Rival("compress, a sixth of the MACs, distilled, int8", {**INT8, "macs": 1 / 6, **OURS}),
}


def make(name: str, row: str, root: Path) -> float:
    """Make a row if it is missing; return the minutes that it took."""
    rival, out = RIVALS[row], root / "rivals" / row
    stamp = out.with_suffix(".minutes")
    if stamp.is_file():
        return float(stamp.read_text())
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    fields = {} if rival.make is None else rival.make(name, root, out)
    if rival.fields is not None:
        _run(name, root, out, {**rival.fields, **fields})
    minutes = (time.perf_counter() - start) / 60
    stamp.write_text(f"{minutes}")
    return minutes


def _run(name: str, root: Path, out: Path, fields: Mapping[str, Any]) -> None:
    length = SETS[name].max_length
    needs_rows = {"keep", "macs", "distill"} & set(fields)
    recipe: dict[str, Any] = {
        "model": starting_model(name, root),
        "batch": (1, 8),
        "seq": (length,),
        "seconds": 1.0,
        "max_length": length,
        **({"data": str(rows_file(name, root)), "metric": SETS[name].metric} if needs_rows else {}),
        **({"shapes": (f"1x{length}", f"8x{length}")} if fields.get("target") == "openvino" else {}),
        **({"statistics": root / "statistics"} if "macs" in fields else {}),
        **fields,
    }
    run(Recipe(**recipe, out=out))


def loaded(name: str, row: str, root: Path) -> Predict:
    """The predictions of a row, loaded from its folder."""
    rival, out = RIVALS[row], root / "rivals" / row
    if rival.backend != "engine":
        torch.set_num_threads(cores.usable_cores())
        model = AutoModelForSequenceClassification.from_pretrained(starting_model(name, root)).eval()
        return _compiled(model) if rival.backend == "compiled" else _eager(model)
    engine = target(str((rival.fields or {}).get("target", "ort"))).load(out / rival.file)

    def predict(feeds: Feeds) -> np.ndarray:
        return np.asarray(engine.run(dict(feeds))["logits"])

    return predict


def _eager(model: Callable[..., Any]) -> Predict:
    def predict(feeds: Feeds) -> np.ndarray:
        with torch.inference_mode():
            logits: Tensor = model(
                **{key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in feeds.items()}
            ).logits
            return logits.numpy()

    return predict


def _compiled(model: PreTrainedModel) -> Predict:
    torch._inductor.config.freezing = True
    return _eager(torch.compile(model))


def measure(name: str, row: str, root: Path) -> dict[str, Any]:
    """The numbers of a row, in a process of its own."""
    length = SETS[name].max_length
    model = starting_model(name, root)
    reference_file = reference_engine(model, length, root)
    folder = load(model)
    memory = _memory_growth(lambda: loaded(name, row, root), _feeds(folder, 8, length))
    predict, reference = loaded(name, row, root), target("ort").load(reference_file)
    result: dict[str, Any] = {"memory": memory, "bytes": _file_bytes(name, row, root)}
    for batch in (1, 8):
        feeds = _feeds(folder, batch, length)
        pairs = alternate_calls(partial(reference.run, feeds), partial(predict, feeds), SECONDS)
        times = np.stack(list(pairs), axis=1)
        medians = np.median(times.reshape(2, -1), axis=1)
        result[f"p50-{batch}"], result[f"ratio-{batch}"] = 1e3 * medians[1], medians[0] / medians[1]
    data = open_data(RowsConfig(data=str(rows_file(name, root)), max_length=length, metric=SETS[name].metric), folder)

    def scored(call: Predict) -> np.ndarray:
        # Rows are padded to one length, so that compiled models are compiled once for each batch size.
        def forward(batch: dict[str, Tensor]) -> np.ndarray:
            return call({key: _padded(value.numpy(), length) for key, value in batch.items()})

        return statistics(data.task, data.test, forward, batch_size=8)

    dense, rival = scored(lambda feeds: np.asarray(reference.run(dict(feeds))["logits"])), scored(predict)
    interval = paired_interval(dense, rival, data.task.score, 0)
    return {
        **result,
        "rows": len(data.test),
        "metric": data.task.score(rival),
        "difference": data.task.score(rival) - data.task.score(dense),
        "low": interval.low,
        "high": interval.high,
    }


def _feeds(folder: Any, batch: int, length: int) -> dict[str, np.ndarray]:
    return {key: value.numpy() for key, value in example_inputs(folder, batch, length).items()}


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, length - values.shape[1])))


def _memory_growth(load_rival: Callable[[], Predict], feeds: Feeds) -> int:
    process = psutil.Process()
    before = process.memory_info().rss
    load_rival()(feeds)
    return int(process.memory_info().rss - before)


def _file_bytes(name: str, row: str, root: Path) -> int:
    file = RIVALS[row].file
    if RIVALS[row].backend != "engine":
        return (starting_model(name, root) / "model.safetensors").stat().st_size
    return sum(path.stat().st_size for path in (root / "rivals" / row).glob(f"{Path(file).stem}.*"))


def row_of(name: str, row: str, args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of a row: stored, or made and measured in a process of its own; or why it cannot be made."""
    file = args.out / name / "rivals" / f"{row}.json"
    if not file.is_file():
        command = [sys.executable, "-m", "benchmarks.rivals", name, "--out", str(args.out), "--one", row]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if process.returncode:
            return {"failed": f"exit code {process.returncode}"}
        file.write_text(process.stdout.splitlines()[-1])
    numbers: dict[str, Any] = json.loads(file.read_text())
    return numbers


def as_cells(row: str, numbers: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table as text."""
    if "failed" in numbers:
        return {"model and engine": RIVALS[row].title, "metric": f"not made: {numbers['failed']}"}
    low, high = 100 * numbers["low"], 100 * numbers["high"]
    return {
        "model and engine": RIVALS[row].title,
        "metric": f"{100 * numbers['metric']:.1f}",
        "difference (95%)": f"{100 * numbers['difference']:+.1f} ({low:+.1f} to {high:+.1f})",
        "batch 1, ms": f"{numbers['p50-1']:.2f}",
        "batch 1": f"{numbers['ratio-1']:.2f}x",
        "batch 8, ms": f"{numbers['p50-8']:.1f}",
        "batch 8": f"{numbers['ratio-8']:.2f}x",
        "MB": f"{numbers['bytes'] / 1e6:.0f}",
        "memory, MB": f"{numbers['memory'] / 1e6:.0f}",
        "minutes": f"{numbers['minutes']:.1f}",
    }


def draw(rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The metric of every row against its speed at batch 8; rows of compress are filled."""
    figure = Figure((7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for row, numbers in rows.items():
        if "failed" not in numbers:
            ours = RIVALS[row].title.startswith("compress")
            point = numbers["ratio-8"], 100 * numbers["metric"]
            axes.plot(*point, "o", color="#0b7a75" if ours else "#59616c", fillstyle="full" if ours else "none")
            axes.annotate(RIVALS[row].title, point, (4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="times the speed of ONNX Runtime, fp32, batch 8, 128 tokens", ylabel="metric on test rows, %")
    axes.grid(color="#dcdfe4", linewidth=0.7)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    """Print the table of each set that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--rows", nargs="+", choices=list(RIVALS), default=list(RIVALS))
    parser.add_argument("--picture", type=Path, help="a PNG to write")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    parser.add_argument("--one", choices=list(RIVALS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        root = args.out / args.sets[0]
        minutes = make(args.sets[0], args.one, root)
        print(json.dumps({**measure(args.sets[0], args.one, root), "minutes": minutes}))
        return
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    for name in args.sets:
        (args.out / name).mkdir(parents=True, exist_ok=True)
        rows = {row: row_of(name, row, args) for row in args.rows}
        print(f"\n{name}\n{table([as_cells(row, numbers) for row, numbers in rows.items()])}", flush=True)
        if args.picture is not None:
            draw(rows, args.picture)


if __name__ == "__main__":
    main()
