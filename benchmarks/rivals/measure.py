"""The numbers of a row: the same code for all, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quantization import reference_engine, starting_model
from benchmarks.rivals.data import INPUTS, Feeds, PositionalModel, open_set, output_names, random_feeds
from benchmarks.rivals.rows import RIVALS, Backend, Rival, row_and_seed
from benchmarks.rivals.tools import import_torchao
from benchmarks.text_sets import SETS
from compressor.measure import paired_interval
from compressor.measure.timing import alternate_calls
from compressor.targets import target
from compressor.targets.machine import usable_cores
from compressor.targets.peak_memory import peak_bytes, reset_peak
from compressor.tasks import Data, statistics
from compressor.tasks.base import Batch
from graph_passes.files import atomic_replace

SECONDS = 4.0
"""Time spent on each pair of engines at each batch size."""
BATCH = 8
"""Rows in a batch of test rows, and the larger of the two batch sizes that are timed."""
Outputs = Mapping[str, Any]
"""Outputs of one batch by name, arrays or tensors."""
Predict = Callable[[Feeds], Outputs]


def score(name: str, folder: str, root: Path) -> dict[str, Any]:
    """Peak memory, files and metric of a row.

    Args:
        name: key of `SETS`.
        folder: name of the folder of the row.
        root: folder of the set.
    """
    length = SETS[name].max_length
    before = reset_peak()
    predict = _load(name, folder, root)
    predict(random_feeds(BATCH, length))
    memory = peak_bytes() - before
    data = open_set(name, root)
    dense, rival = _dense_statistics(_reference(name, root), data, length, root), _statistics(predict, data, length)
    interval = paired_interval(dense, rival, data.task.score, 0)
    return {
        "memory": memory,
        "bytes": _file_bytes(name, folder, root),
        "rows": len(data.test),
        "heading": data.task.metric_heading,
        "scale": data.task.metric_unit.scale,
        "metric": data.task.score(rival),
        "difference": data.task.score(rival) - data.task.score(dense),
        "low": interval.low,
        "high": interval.high,
    }


def time_calls(name: str, folder: str, root: Path) -> dict[str, float]:
    """Milliseconds of a call of a row, and how many times as fast it is as the reference engine, by batch size.

    Args:
        name: key of `SETS`.
        folder: name of the folder of the row.
        root: folder of the set.
    """
    length, result = SETS[name].max_length, {}
    predict, reference = _load(name, folder, root), _reference(name, root)
    for batch in (1, BATCH):
        feeds = random_feeds(batch, length)
        pairs = alternate_calls(partial(reference, feeds), partial(predict, feeds), SECONDS)
        times = np.stack(list(pairs), axis=1)
        medians = np.median(times.reshape(2, -1), axis=1)
        result[f"p50-{batch}"], result[f"ratio-{batch}"] = 1e3 * medians[1], medians[0] / medians[1]
    return result


def _reference(name: str, root: Path) -> Predict:
    """ONNX Runtime's own fused fp32 engine of the whole model."""
    return target("ort").load(reference_engine(starting_model(name, root), SETS[name].max_length, root)).run


def _statistics(predict: Predict, data: Data, length: int) -> np.ndarray:
    def forward(batch: Batch) -> np.ndarray:
        feeds = {key: batch[key] for key in INPUTS}
        return data.task.logits(predict_padded(predict, feeds, length))

    return statistics(data.task, data.test, forward, batch_size=BATCH)


def _dense_statistics(predict: Predict, data: Data, length: int, root: Path) -> np.ndarray:
    """Statistics of the whole model, computed for the first row that needs them."""
    file = root / "rivals" / "dense.npy"
    if not file.is_file():
        with atomic_replace(file) as temporary, temporary.open("wb") as stream:
            np.save(stream, _statistics(predict, data, length))
    stored: np.ndarray = np.load(file)
    return stored


def predict_padded(predict: Predict, feeds: Feeds, length: int) -> dict[str, np.ndarray]:
    """Outputs of any number of rows, computed in batches of one shape.

    A model that is compiled for the shapes it meets would otherwise be compiled for hundreds of them. The positions of
    the padding are removed from outputs that have positions.

    Args:
        predict: runs one batch `[BATCH, length]`.
        feeds: inputs `[rows, tokens]`.
        length: length of the batches in tokens.
    """
    rows, tokens = feeds["input_ids"].shape
    padding = (0, -rows % BATCH), (0, length - tokens)
    # Rows of the padding repeat the last one: no engine meets a row without tokens.
    padded = {
        key: np.pad(np.pad(value, (padding[0], (0, 0)), "edge"), ((0, 0), padding[1])) for key, value in feeds.items()
    }
    parts = [
        predict({key: value[start : start + BATCH] for key, value in padded.items()})
        for start in range(0, rows + padding[0][1], BATCH)
    ]
    outputs = {key: np.concatenate([np.asarray(part[key]) for part in parts])[:rows] for key in parts[0]}
    return {key: value[:, :tokens] if value.shape[1:2] == (length,) else value for key, value in outputs.items()}


def _rival(folder: str) -> Rival:
    return RIVALS[row_and_seed(folder)[0]]


def _load(name: str, folder: str, root: Path) -> Predict:
    return BACKENDS[_rival(folder).backend](name, folder, root)


def _load_engine(name: str, folder: str, root: Path) -> Predict:
    rival = _rival(folder)
    assert rival.file is not None
    return target(rival.runtime).load(root / "rivals" / folder / rival.file).run


def _load_pytorch(name: str, folder: str, root: Path) -> Predict:
    return partial(_call, _network(name, root))


def _load_compiled(name: str, folder: str, root: Path) -> Predict:
    return partial(_call, _compiled(_network(name, root)))


def _load_autocast(name: str, folder: str, root: Path) -> Predict:
    compiled = _compiled(_network(name, root))

    def predict(feeds: Feeds) -> Outputs:
        with torch.autocast("cpu", torch.bfloat16):
            return {key: value.float() for key, value in _call(compiled, feeds).items()}

    return predict


def _load_torchao(name: str, folder: str, root: Path) -> Predict:
    import_torchao(root)
    import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401 - registers the operators of the program

    torch.set_num_threads(usable_cores())
    return partial(_call, _compiled(torch.export.load(root / "rivals" / folder / "engine.pt2").module()))


def _network(name: str, root: Path) -> PositionalModel:
    torch.set_num_threads(usable_cores())
    auto_class = SETS[name].auto_class
    # A folder may hold its weights in fp16, which processors compute slowly in.
    model = auto_class.from_pretrained(starting_model(name, root), dtype=torch.float32)  # type: ignore[attr-defined]
    return PositionalModel(model, output_names(name)).eval()


def _compiled(model: Callable[..., Any]) -> Callable[..., Any]:
    torch._inductor.config.freezing = True
    return torch.compile(model, dynamic=False)


def _call(model: Callable[..., Outputs], feeds: Feeds) -> Outputs:
    # Frozen weights are constants under `no_grad` only; an exported program does not run in inference mode.
    with torch.no_grad():
        return model(*(torch.from_numpy(np.ascontiguousarray(feeds[key])) for key in INPUTS))


def _load_optimum(name: str, folder: str, root: Path) -> Predict:
    """As `OVModel` compiles and calls it: free axes, and the precision that OpenVINO prefers beside int8."""
    import openvino

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": usable_cores()}
    model = openvino.Core().compile_model(root / "rivals" / folder / "openvino_model.xml", "CPU", options)
    request = model.create_infer_request()
    names = [output.get_any_name() for output in model.outputs]

    def predict(feeds: Feeds) -> Outputs:
        outputs = request.infer({key: feeds[key] for key in INPUTS}, share_inputs=True)
        return dict(zip(names, outputs.values(), strict=True))

    return predict


BACKENDS: Mapping[Backend, Callable[[str, str, Path], Predict]] = {
    "engine": _load_engine,
    "pytorch": _load_pytorch,
    "compiled": _load_compiled,
    "autocast": _load_autocast,
    "optimum": _load_optimum,
    "torchao": _load_torchao,
}
"""How each row is loaded; a function takes the name of the set, that of the row's folder, and the folder of the set."""


def _file_bytes(name: str, folder: str, root: Path) -> int:
    file = _rival(folder).file
    if file is None:
        return (starting_model(name, root) / "model.safetensors").stat().st_size
    return sum(path.stat().st_size for path in (root / "rivals" / folder).glob(f"{Path(file).stem}.*"))
