"""What other tools make of the model, each in the versions of `pins/`.

They are installed beside the rows of all sets, into folders of their own, since some need older versions of libraries
that `compress` needs too. A tool that cannot be installed raises ToolError, and its row says why it is not there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks.quantization import reference_engine, starting_model
from benchmarks.rivals.data import INPUTS, PositionalModel, calibration_rows, join_equal_lengths, output_names
from benchmarks.text_sets import SETS
from compressor.model_folder import example_inputs, load

HERE = Path(__file__).parent
FINETUNE_ROWS, FINETUNE_TOKENS = 1024, 40_000
"""Rows for onnxsim; it holds every activation of every token in double precision, 110 kB for each token of MiniLM."""
CALIBRATION_ROWS = 300
"""Rows to quantize with: the number that NNCF reads by default."""


class ToolError(RuntimeError):
    """A tool could not be installed, or failed."""


def prune_with_onnxsim(name: str, root: Path, out: Path) -> dict[str, Any]:
    """Half of the neurons and heads removed by onnxsim, by weight times activation (Wanda), and the rest refitted.

    It finds attentions and feed-forwards in ONNX Runtime's fused graph only; in the exported one it finds the pooler.
    """
    import_onnxsim(root)
    import onnxsim

    rows = join_equal_lengths(calibration_rows(name, root, FINETUNE_ROWS, FINETUNE_TOKENS))
    reference = onnx.load(reference_engine(starting_model(name, root), SETS[name].max_length, root))
    dense, _ = onnxsim.simplify(reference)
    pruned = onnxsim.apply_structured_wanda_pruning(dense, calibration_data=rows, sparsity=0.5)
    pruned = onnxsim.apply_attention_head_wanda_pruning(pruned, calibration_data=rows, sparsity=0.5)
    refitted = onnxsim.apply_pruning_finetune(dense, pruned, calibration_data=rows)
    # Weights in a file of their own are mapped into memory, as in the other engines.
    onnx.save(refitted, out / "engine.onnx", save_as_external_data=True, location="engine.onnx.data")
    return {}


def quantize_with_optimum(name: str, root: Path, out: Path) -> dict[str, Any]:
    """optimum-intel's static int8 in an environment of its own: exported to OpenVINO, quantized by NNCF."""
    rows = calibration_rows(name, root, CALIBRATION_ROWS)
    rows_path = out / "rows.json"
    rows_path.write_text(json.dumps([{key: value.tolist() for key, value in row.items()} for row in rows]))
    _run_optimum(name, root, out, rows_path)
    rows_path.unlink()
    return {}


def export_with_optimum(name: str, root: Path, out: Path) -> dict[str, Any]:
    """optimum-intel's export to OpenVINO, in an environment of its own, without quantization."""
    _run_optimum(name, root, out)
    return {}


def _run_optimum(name: str, root: Path, out: Path, *rows: Path) -> None:
    # The names of transformers' classes, with OV before them, are optimum-intel's.
    model_class = SETS[name].auto_class.__name__.replace("Auto", "OV")
    script = HERE / "optimum_export.py"
    _run("optimum-intel", [optimum_python(root), script, starting_model(name, root), model_class, out, *rows])


def quantize_with_torchao(name: str, root: Path, out: Path) -> dict[str, Any]:
    """torchao's static int8 for x86 (PT2E): linears with weights and inputs in 8 bits, for `torch.compile`."""
    import_torchao(root)
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    folder = load(starting_model(name, root))
    example = example_inputs(folder, 2, 8)
    inputs = tuple(example[key] for key in INPUTS)
    free = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=2, max=512)}
    network = PositionalModel(folder.model.eval(), output_names(name))
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        exported = torch.export.export(network, inputs, dynamic_shapes=(free,) * len(inputs))
        observed = prepare_pt2e(exported.module(), quantizer)
        for row in calibration_rows(name, root, CALIBRATION_ROWS):
            observed(*(torch.from_numpy(row[key]) for key in INPUTS))
        quantized = convert_pt2e(observed)
        _remove_unused_weights(quantized)
        torch.export.save(
            torch.export.export(quantized, inputs, dynamic_shapes=(free,) * len(inputs)), out / "engine.pt2"
        )
    return {}


def import_onnxsim(root: Path) -> None:
    """Make onnxsim importable."""
    _add_to_path("onnxsim", root)


def optimum_python(root: Path) -> Path:
    """The interpreter of the environment that has optimum-intel."""
    return _environment("optimum-intel", root)


def import_torchao(root: Path) -> None:
    """Make torchao importable; its operators are in the quantized program."""
    _add_to_path("torchao", root)


def import_sentence_transformers(root: Path) -> None:
    """Make sentence-transformers importable."""
    _add_to_path("sentence-transformers", root)


def embed_with_library(
    backend: str, model: Path, texts: Sequence[str], root: Path, out: Path, rows: Path | None = None
) -> np.ndarray:
    """Embeddings `[texts, width]` by a backend of sentence-transformers, in an environment of its own.

    Args:
        backend: `onnx` or `openvino`.
        model: the folder that the library loads.
        texts: the texts.
        root: folder of the set.
        out: receives the embeddings, and the library's int8 graph.
        rows: calibration rows of that graph; None: the folder is run as it is.
    """
    python = _environment(f"sentence-{backend}", root)
    out.mkdir(parents=True, exist_ok=True)
    texts_path, embeddings_path = out / "texts.json", out / "embeddings.npy"
    texts_path.write_text(json.dumps(list(texts)))
    options: list[str | Path] = ["--int8", out, "--rows", rows] if rows is not None else []
    command = [python, HERE / "sentence_export.py", backend, model, texts_path, embeddings_path, *options]
    _run(f"sentence-{backend}", command)
    embeddings: np.ndarray = np.load(embeddings_path)
    return embeddings


def library_graph(backend: str, out: Path) -> Path:
    """The int8 graph that sentence-transformers wrote into a folder."""
    names = (path for path in (out / backend).iterdir() if path.suffix in (".onnx", ".xml"))
    return next(path for path in names if "qint8" in path.name)


def _remove_unused_weights(module: torch.fx.GraphModule) -> None:
    """Remove the float weights that the conversion leaves beside the quantized ones; they would count in the file."""
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name, _ in list(module.named_parameters()):
        if name not in used:
            owner, _, attribute = name.rpartition(".")
            delattr(module.get_submodule(owner), attribute)


def _tools(root: Path) -> Path:
    return root.parent / "tools"


def _add_to_path(tool: str, root: Path) -> None:
    """Install a tool that runs with the libraries of this environment, and make it importable."""
    folder = _tools(root) / tool
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        _install(
            tool, sys.executable, "--no-deps", "--upgrade", "--target", partial, "-r", HERE / "pins" / f"{tool}.txt"
        )
        partial.rename(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _environment(tool: str, root: Path) -> Path:
    """The interpreter of an environment that holds the pinned versions and no others."""
    folder, pins = _tools(root) / tool, HERE / "pins" / f"{tool}.txt"
    python, stamp = folder / "bin" / "python", folder / "ready"
    if not stamp.is_file():
        venv.create(folder, clear=True, with_pip=True)
        # torch alone is installed with what it needs: its builds for GPUs come in several packages.
        _install(tool, python, "-c", pins, "torch")
        _install(tool, python, "--no-deps", "-r", pins)
        stamp.touch()
    return python


def _install(tool: str, python: str | Path, *arguments: str | Path) -> None:
    _run(f"installing {tool}", [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments])


def _run(what: str, command: Sequence[str | Path]) -> None:
    """Run a command; its output is shown, and its last line is the reason where it fails.

    Args:
        what: what the command does, for the error.
        command: the command.

    Raises:
        ToolError: it fails.
    """
    process = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(process.stdout, file=sys.stderr, end="")
    if process.returncode:
        lines = process.stdout.split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {process.returncode}")
        raise ToolError(f"{what} failed: {reason}")
