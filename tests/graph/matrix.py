"""Families of models through exporters: which groups of their graphs are found, and whether the numbers stay the same.

`python -m tests.graph.matrix` prints the table in Markdown, and with `--write` records it in `matrix.json`, by which
`test_matrix.py` compares. The outcome of a cell is

- `whole`: every group of the PyTorch model is found;
- `part: <reason>`: some are found, and obstacles name what prevents the removal of the others;
- `refused: <reason>`: no group is found, or the graph is refused, by name;
- `no graph: <reason>`: the exporter fails or is not installed, or ONNX Runtime refuses what it writes;
- `silent: <groups>` and `wrong: <check>`: faults of this project.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor

import graph_passes
from benchmarks.machine import machine
from compressor.errors import CompressorError
from compressor.graph.config import GraphConfig
from compressor.graph.file import GraphFile
from compressor.graph.program import Program
from compressor.units import find_groups
from graph_passes import GraphPassError, Plan, gate_groups, shrink
from tests.graph_passes.exporters import Attention, export, trace
from tests.graph_passes.graphs import run
from tests.graph_passes.test_shrink_exports import feeds
from tests.zoo import FAMILIES as ZOO
from tests.zoo import Case

RECORD = Path(__file__).with_name("matrix.json")
_PACKAGES = Path(os.environ.get("COMPRESSOR_EXPORTERS", Path(__file__).parents[2] / ".venv" / "exporters"))
"""Where `scripts/exporters.sh` installs the exporters that are not part of the environment."""
NOT_INSTALLED = "no graph: not installed"
FLOAT_TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Largest difference relative to the largest output."""
LEAST_CHANGE = 1e-3
"""Half of the units change the outputs by more."""


class NotInstalledError(Exception):
    """The package of an exporter is missing."""


def _whisper_encoder(seed: int) -> Case:
    model, inputs = ZOO["whisper"](seed)
    encoder = model.get_encoder()
    return encoder, {"input_features": inputs["input_features"]}


_OF_ZOO = ("bert", "roberta", "distilbert", "electra", "modernbert", "gpt2", "llama", "qwen3", "t5", "vit", "clip_text")
FAMILIES: Mapping[str, Callable[[int], Case]] = {
    **{name: ZOO[name] for name in _OF_ZOO},
    "whisper encoder": _whisper_encoder,
}
_TASKS = {
    **dict.fromkeys(("gpt2", "llama", "qwen3"), "text-generation"),
    "t5": "text2text-generation",
    "vit": "image-classification",
    "clip_text": "feature-extraction",
    "whisper encoder": "automatic-speech-recognition",
}
"""Family -> task for optimum; that of other families is text classification."""
_OPTIMIZED_AS = {"gpt2": "gpt2", "llama": "gpt2", "qwen3": "qwen3", "t5": "t5", "vit": "vit", "clip_text": "clip"}
"""Family -> type of model for ONNX Runtime's optimizer; other families are of type `bert`, or `bart` for Whisper."""


def case_of(family: str) -> Case:
    """A model without a cache, and its inputs."""
    model, inputs = FAMILIES[family](0)
    model.config.use_cache = False
    return model, inputs


def _attention(family: str, opset: int) -> Attention:
    """That of transformers by default; eager where an exporter fails at it or ONNX Runtime would not fuse it."""
    return "eager" if opset in (11, 17) or family == "t5" else "sdpa"


def _legacy(opset: int) -> Callable[[str, Path], Path]:
    def write(family: str, folder: Path) -> Path:
        path = folder / f"{family} legacy {opset}.onnx"
        if not path.is_file():
            trace(*case_of(family), path, opset=opset, attention=_attention(family, opset))
        return path

    return write


def _dynamo(family: str, folder: Path) -> Path:
    path = folder / f"{family} dynamo.onnx"
    export(*case_of(family), path, opset=18, attention=_attention(family, 18))
    return path


def _onnxruntime(family: str, folder: Path) -> Path:
    from onnxruntime.transformers.optimizer import optimize_model

    config = case_of(family)[0].config.get_text_config()
    kind = _OPTIMIZED_AS.get(family, "bart" if family == "whisper encoder" else "bert")
    source = _legacy(17)(family, folder)
    optimized = optimize_model(str(source), kind, config.num_attention_heads, config.hidden_size)
    path = folder / f"{family} onnxruntime.onnx"
    optimized.save_model_to_file(str(path))
    return path


def _onnxsim(family: str, folder: Path) -> Path:
    installed = _installed("onnxsim")
    if installed not in sys.path:
        sys.path.append(installed)
    simplified, _ = importlib.import_module("onnxsim").simplify(onnx.load(_legacy(17)(family, folder)))
    path = folder / f"{family} onnxsim.onnx"
    onnx.save(simplified, path)
    return path


def _optimum(family: str, folder: Path) -> Path:
    """The graph that optimum writes of a model folder: of the whole model, but of Whisper that of the encoder."""
    python = _installed("optimum/bin/python")
    model = ZOO["whisper"](0)[0] if family == "whisper encoder" else case_of(family)[0]
    source, written = folder / f"{family} folder", folder / f"{family} optimum"
    model.save_pretrained(source)
    task = ["--task", _TASKS.get(family, "text-classification"), "--library-name", "transformers", "--opset", "18"]
    whole = [] if family == "whisper encoder" else ["--monolith"]
    command: list[str | Path] = [python, "-m", "optimum.exporters.onnx", "--model", source, *task, *whole, written]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
    return written / ("model.onnx" if whole else "encoder_model.onnx")


def _installed(name: str) -> str:
    """A path that `scripts/exporters.sh` writes."""
    path = _PACKAGES / name
    if not path.exists():
        raise NotInstalledError
    return str(path)


def _halves(family: str, folder: Path) -> Path:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    path = folder / f"{family} fp16.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that are clipped
        onnx.save(convert_float_to_float16(onnx.load(_legacy(17)(family, folder)), max_finite_val=65504.0), path)
    return path


def int8(family: str, folder: Path) -> Path:
    """The graph with weights of integers, as ONNX Runtime's dynamic quantization writes it."""
    from onnxruntime.quantization import quantize_dynamic

    path = folder / f"{family} int8.onnx"
    quantize_dynamic(_legacy(17)(family, folder), path)
    return path


EXPORTERS: Mapping[str, Callable[[str, Path], Path]] = {
    "dynamo 18": _dynamo,
    "legacy 11": _legacy(11),
    "legacy 14": _legacy(14),
    "legacy 17": _legacy(17),
    "ONNX Runtime": _onnxruntime,
    "onnxsim": _onnxsim,
    "optimum": _optimum,
    "fp16": _halves,
}


def outcome(family: str, exporter: str, folder: Path) -> str:
    """The outcome of a cell.

    Args:
        family: a key of `FAMILIES`.
        exporter: a key of `EXPORTERS`.
        folder: where graphs are written, which cells may share.
    """
    model, inputs = case_of(family)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            path = EXPORTERS[exporter](family, folder)
    except NotInstalledError:
        return NOT_INSTALLED
    except Exception as error:  # an exporter fails with any
        return f"no graph: the exporter raises {type(error).__name__}"
    try:
        source = graph_passes.load(path)
        inputs = {**inputs, **_further(inputs, source)}
        arrays = feeds(inputs, source)
        try:
            whole = run(source, arrays)
        except Exception as error:  # a runtime fails with any
            return f"no graph: ONNX Runtime raises {type(error).__name__}"
        program = Program.of(path, {name: tuple(value.shape) for name, value in inputs.items()})
        file = GraphFile(program, GraphConfig())
        if (wrong := next(_wrong(file, program, inputs, whole, exporter == "fp16"), None)) is not None:
            return f"wrong: {wrong}"
    except (CompressorError, GraphPassError) as error:
        return f"refused: {error.code}"
    expected = Counter(f"{group.units} {group.type}" for group in find_groups(model, inputs))
    recognized = Counter(f"{group.units} {group.type}" for group in program.search.groups)
    if recognized == expected:
        return "whole"
    reasons = sorted({f"{obstacle.op} {obstacle.code}" for obstacle in program.search.obstacles})
    if not reasons or recognized - expected:
        return f"silent: {dict(recognized)} of {dict(expected)}"
    return f"{'part' if recognized else 'refused'}: {', '.join(reasons)}"


def _further(inputs: Mapping[str, Tensor], graph: ir.Model) -> dict[str, Tensor]:
    """Inputs that optimum gives a graph and the model computes itself."""
    ids = inputs.get("input_ids")
    if ids is None:
        return {}
    further = {"position_ids": torch.arange(ids.shape[1]).expand_as(ids), "token_type_ids": torch.zeros_like(ids)}
    names = {value.name for value in graph.graph.inputs} - set(inputs)
    return {name: value for name, value in further.items() if name in names}


def _wrong(
    file: GraphFile, program: Program, inputs: Mapping[str, Tensor], whole: list[np.ndarray], halves: bool
) -> Iterator[str]:
    """The checks that fail: of the network, and of the graph with half of the units of every group."""
    tolerance = HALF_TOLERANCE if halves else FLOAT_TOLERANCE

    def read() -> ir.Model:
        model = graph_passes.load(program.file)
        graph_passes.record_example_sizes(model, {name: value.shape for name, value in inputs.items()})
        return model

    arrays = feeds(inputs, read())
    with torch.no_grad():
        computed = file.network(**{name: inputs[name] for name in file.input_specs})
    if (difference := error([value.numpy() for value in computed.values()], whole)) > tolerance:
        yield f"the network differs by {difference:.1e}"
    groups = [dataclasses.replace(group, name=group.linear) for group in program.search.groups]
    plan = Plan(groups=tuple(group.plan(range(group.units // 2, group.units)) for group in groups))
    if not groups:
        return
    shrunk = shrink(read(), plan)
    if shrunk.refused:
        yield f"shrink refuses {shrunk.obstacle}"
    outputs = run(shrunk.model, arrays)
    gated = run(gate_groups(read(), plan), arrays)
    with file.reference(plan) as run_file:
        zeroed = list(run_file(arrays).values())
    if (difference := error(outputs, gated)) > tolerance:
        yield f"the shrunk graph differs from the gated one by {difference:.1e}"
    if (difference := error(outputs, zeroed)) > tolerance:
        yield f"the shrunk graph differs from that of weights of zero by {difference:.1e}"
    if error(outputs, whole) < LEAST_CHANGE:
        yield "half of the units change nothing"


def error(outputs: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Largest difference relative to the largest magnitude of each output; infinite where one is no number."""
    assert [array.shape for array in outputs] == [array.shape for array in reference]
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(outputs, reference, strict=True)]
    differences = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]
    return max(difference if np.isfinite(difference) else np.inf for difference in differences)


def recorded() -> dict[str, dict[str, str]]:
    """Family -> exporter -> the expected outcome."""
    record: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
    return record


def table(outcomes: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The lines of the table, and the number of whole cells."""
    yield f"| family | {' | '.join(EXPORTERS)} |"
    yield f"|{'---|' * (len(EXPORTERS) + 1)}"
    for family, row in outcomes.items():
        yield f"| {family} | {' | '.join(row.values())} |"
    cells = [cell for row in outcomes.values() for cell in row.values()]
    yield ""
    yield f"{cells.count('whole')} of {len(cells)} whole, {cells.count(NOT_INSTALLED)} not installed."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="families of models through exporters of ONNX graphs")
    parser.add_argument("--write", action="store_true", help=f"record the outcomes in {RECORD.name}")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    outcomes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in options.families:
            outcomes[family] = {exporter: outcome(family, exporter, Path(folder)) for exporter in EXPORTERS}
            print(f"{family}: {outcomes[family]}", file=sys.stderr, flush=True)
    print(f"{date.today()}, {machine('torch', 'transformers', 'onnxruntime')}\n")
    print("\n".join(table(outcomes)))
    if options.write:
        outcomes = {**(recorded() if RECORD.is_file() else {}), **outcomes}
        ordered = {family: outcomes[family] for family in FAMILIES if family in outcomes}
        RECORD.write_text(json.dumps(ordered, indent=2) + "\n")


if __name__ == "__main__":
    main()
