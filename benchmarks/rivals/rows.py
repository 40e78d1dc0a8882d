"""The rows of the table: what each is, and how it is made."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.calibrate import CalibrationDataReader
from transformers import AutoTokenizer

from benchmarks.quantization import reference_engine, run, starting_model
from benchmarks.rivals import tools
from benchmarks.rivals.data import Feeds, calibration_rows
from benchmarks.text_sets import SETS, further_texts, rows_file
from compressor.config.run import Recipe
from compressor.model_folder import example_inputs, load
from compressor.silence_libraries import quiet_transformers
from compressor.targets import target
from compressor.units import find_sites, keep_all

Backend = Literal["engine", "pytorch", "compiled", "autocast", "optimum", "torchao"]


@dataclass(frozen=True)
class Rival:
    """A row of the table.

    Attributes:
        title: what it is, for readers.
        fields: fields of the recipe of its run; None: it is made without a run.
        make: what comes before the run, or replaces it; returns further fields of the recipe. Its arguments are the
            name of the set, the folder of the set and the folder of the row, which is empty where there is no run.
        backend: how it is loaded (`measure.BACKENDS`).
        install: installs the tool that makes it, which is not part of its minutes; its argument is the folder of the
            set.
        weights_of: key of the row whose model its run starts from; it is made before, which is not part of the minutes.
            None: the run starts from the whole model.
    """

    title: str
    fields: Mapping[str, Any] | None = None
    make: Callable[[str, Path, Path], dict[str, Any]] | None = None
    backend: Backend = "engine"
    install: Callable[[Path], object] | None = None
    weights_of: str | None = None

    @property
    def draws(self) -> bool:
        """Whether it is a run that chooses units or trains by rows that are drawn with the seed."""
        return bool({"macs", "distill", "epochs"} & set(self.fields or {}))

    @property
    def runtime(self) -> str:
        """The target whose engine it is."""
        return str((self.fields or {}).get("target", "ort"))

    @property
    def file(self) -> str | None:
        """The file in its folder that is loaded; None: the starting model is."""
        files: dict[str, str | None] = {"optimum": "openvino_model.xml", "torchao": "engine.pt2"}
        files |= dict.fromkeys(("pytorch", "compiled", "autocast"))
        return files[self.backend] if self.backend in files else target(self.runtime).engine_file


def quantize_weights(name: str, root: Path, out: Path) -> dict[str, Any]:
    """ONNX Runtime's dynamic quantization of its fused graph, as its documentation recommends."""
    model = onnx.load(reference_engine(starting_model(name, root), SETS[name].max_length, root))
    # The quantizer reuses names, and compares its own shapes with stored ones. Fused operators have no shape inference.
    model.graph.ClearField("value_info")
    quantize_dynamic(
        model,
        out / "engine.onnx",
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    return {}


class RowReader(CalibrationDataReader):
    """Gives rows to ONNX Runtime's calibration, one at a time.

    Args:
        rows: the rows, each a batch of its own.
    """

    def __init__(self, rows: Iterable[Feeds]) -> None:
        self._rows = iter(rows)

    def get_next(self) -> Feeds | None:
        """The next row; None behind the last."""
        return next(self._rows, None)


def quantize_statically(name: str, root: Path, out: Path) -> dict[str, Any]:
    """ONNX Runtime's static quantization (QDQ) of the matrix products of the graph, by the ranges of drawn rows."""
    reference_engine(starting_model(name, root), SETS[name].max_length, root)
    folded = out / "folded.onnx"  # the exported graph transposes weights, which hides them from the quantizer
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    exported = onnx.load(root / "reference" / "model.onnx").SerializeToString()
    onnxruntime.InferenceSession(exported, options, providers=["CPUExecutionProvider"])
    quantize_static(
        folded,
        out / "engine.onnx",
        RowReader(calibration_rows(name, root, tools.CALIBRATION_ROWS)),
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
        extra_options={"MatMulConstBOnly": True},  # as its documentation recommends: products with weights
    )
    folded.unlink()
    return {}


def drop_layers(name: str, root: Path, out: Path) -> dict[str, Any]:
    """Every second layer of the model, as DistilBERT is initialized; it is distilled by the run that follows."""
    student, model = out.with_name("every-second-layer"), starting_model(name, root)
    if not (student / "plan.json").is_file():
        with quiet_transformers():
            network = SETS[name].auto_class.from_pretrained(model, dtype=torch.float32)  # type: ignore[attr-defined]
            layers = network.bert.encoder.layer
            network.bert.encoder.layer = torch.nn.ModuleList(layers[::2])
            network.config.num_hidden_layers = len(layers[::2])
            network.save_pretrained(student)
            AutoTokenizer.from_pretrained(model).save_pretrained(student)
        folder = load(student)
        keep_all(find_sites(folder.model, example_inputs(folder, 2, 8))).save(student / "plan.json")
    return {"model": student, "teacher": model, "hidden_weight": 0.0}


def distill_longer(name: str, root: Path, out: Path) -> dict[str, Any]:
    """Four times the steps of other rows."""
    return {"distill_steps": 4 * SETS[name].distill_steps}


def add_texts(name: str, root: Path, out: Path) -> dict[str, Any]:
    """Texts of the same domain beside the training rows; labels are not read anyway."""
    if SETS[name].further is None:
        raise tools.ToolError(f"there are no further texts of the domain of {name}")
    return {"unlabelled_data": str(further_texts(name, root))}


INT8 = {"target": "openvino", "precision": "int8"}
BF16 = {"target": "openvino", "precision": "bf16"}
AUTO = {"target": "openvino", "precision": "auto"}
DISTILLED = {"distill": True}
RIVALS = {
    "pytorch": Rival("PyTorch, eager", backend="pytorch"),
    "compiled": Rival("PyTorch, torch.compile, frozen", backend="compiled"),
    "autocast": Rival("PyTorch, torch.compile under autocast in bfloat16, frozen", backend="autocast"),
    "torchao": Rival(
        "torchao, static int8 for x86, torch.compile",
        make=tools.quantize_with_torchao,
        backend="torchao",
        install=tools.import_torchao,
    ),
    "ort-fp32": Rival("ONNX Runtime, fp32, fused", {"keep_unread_positions": True}),
    "ort-dynamic": Rival("ONNX Runtime, dynamic int8 of the fused graph", make=quantize_weights),
    "ort-static": Rival("ONNX Runtime, static int8 (QDQ) by its own quantizer", make=quantize_statically),
    "ort-int8": Rival("ONNX Runtime, best int8 of compress", {"precision": "int8", "keep": "100%"}),
    "openvino-fp32": Rival("OpenVINO, fp32", {"target": "openvino", "keep_unread_positions": True}),
    "optimum": Rival(
        "optimum-intel, static int8 by NNCF",
        make=tools.quantize_with_optimum,
        backend="optimum",
        install=tools.optimum_python,
    ),
    "optimum-bf16": Rival(
        "optimum-intel, exported, in bfloat16 where OpenVINO prefers it",
        make=tools.export_with_optimum,
        backend="optimum",
        install=tools.optimum_python,
    ),
    "openvino-bf16": Rival("OpenVINO, bfloat16, by compress, nothing removed", {**BF16, "keep": "100%"}),
    "openvino-int8": Rival(
        "OpenVINO, int8 by NNCF, fixed shape", {**INT8, "keep": "100%", "keep_unread_positions": True}
    ),
    "onnxsim": Rival(
        "onnxsim, half of the heads and neurons (Wanda), refitted, fp32",
        make=tools.prune_with_onnxsim,
        install=tools.import_onnxsim,
    ),
    "dsp": Rival("half of the heads (DSP), int8", {**INT8, "method": "dsp", "keep": 36, "epochs": 1}),
    "magnitude": Rival("magnitude, half of the MACs, int8", {**INT8, "method": "magnitude", "macs": 0.5}),
    "fisher": Rival("Kwon et al., half of the MACs, int8", {**INT8, "method": "fisher", "macs": 0.5}),
    "layers": Rival("every second layer, distilled, int8", {**INT8, **DISTILLED}, drop_layers),
    "layers-fp32": Rival("every second layer, distilled, fp32", {}, weights_of="layers"),
    "pruned-fp32": Rival("compress, half of the MACs, fp32", {"macs": 0.5}),
    "pruned": Rival("compress, half of the MACs, int8", {**INT8, "macs": 0.5}),
    "distilled-fp32": Rival("compress, a fifth of the MACs, distilled, fp32", {"macs": 0.2, **DISTILLED}),
    "distilled": Rival("compress, a quarter of the MACs, distilled, int8", {**INT8, "macs": 0.25, **DISTILLED}),
    "distilled-sixth": Rival("compress, a sixth of the MACs, distilled, int8", {**INT8, "macs": 1 / 6, **DISTILLED}),
    "distilled-sixth-texts": Rival(
        "compress, a sixth of the MACs, distilled with further texts, int8",
        {**INT8, "macs": 1 / 6, **DISTILLED},
        add_texts,
    ),
    "distilled-sixth-fp32": Rival("compress, a sixth of the MACs, distilled, fp32", {}, weights_of="distilled-sixth"),
    "distilled-eighth": Rival("compress, an eighth of the MACs, distilled, int8", {**INT8, "macs": 1 / 8, **DISTILLED}),
    "distilled-eighth-texts": Rival(
        "compress, an eighth of the MACs, distilled with further texts, int8",
        {**INT8, "macs": 1 / 8, **DISTILLED},
        add_texts,
    ),
    "distilled-tenth": Rival("compress, a tenth of the MACs, distilled, int8", {**INT8, "macs": 0.1, **DISTILLED}),
    "distilled-twelfth": Rival(
        "compress, a twelfth of the MACs, distilled four times as long, int8",
        {**INT8, "macs": 1 / 12, **DISTILLED},
        distill_longer,
    ),
    "distilled-twelfth-texts": Rival(
        "compress, a twelfth of the MACs, distilled four times as long with further texts, int8",
        {**INT8, "macs": 1 / 12, **DISTILLED},
        lambda *row: {**distill_longer(*row), **add_texts(*row)},
    ),
}
for _key, _macs in {"distilled": 0.25, "distilled-sixth": 1 / 6, "distilled-tenth": 0.1}.items():
    _title = RIVALS[_key].title.removesuffix("int8")
    RIVALS[f"{_key}-bf16"] = Rival(f"{_title}bfloat16", dict(BF16), weights_of=_key)
    RIVALS[f"{_key}-auto"] = Rival(f"{_title}the fastest precision", {**AUTO, "macs": _macs, **DISTILLED})


def folder_name(row: str, seed: int) -> str:
    """The name of the folder of a row, which has that of its key with seed 0."""
    return f"{row}-seed{seed}" if seed else row


def row_and_seed(folder: str) -> tuple[str, int]:
    """The key of `RIVALS` and the seed of a folder."""
    row, _, seed = folder.partition("-seed")
    return row, int(seed or 0)


def make(name: str, folder: str, root: Path) -> float:
    """Make a row if it is missing; return the minutes that it took.

    Args:
        name: key of `SETS`.
        folder: name of the folder of the row.
        root: folder of the set.
    """
    row, seed = row_and_seed(folder)
    rival, out = RIVALS[row], root / "rivals" / folder
    stamp = out.with_suffix(".minutes")
    if stamp.is_file():
        return float(stamp.read_text())
    out.parent.mkdir(parents=True, exist_ok=True)
    # What many rows start from is not part of the minutes of the first of them.
    reference_engine(starting_model(name, root), SETS[name].max_length, root)
    if rival.install is not None:
        rival.install(root)
    fields: dict[str, Any] = {}
    if rival.weights_of is not None:
        make(name, rival.weights_of, root)
        fields["model"] = root / "rivals" / rival.weights_of
    if rival.fields is None:  # what an interrupted maker left; a run resumes by itself
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
    start = time.perf_counter()
    fields |= {} if rival.make is None else rival.make(name, root, out)
    if rival.fields is not None:
        run(recipe_of(name, root, out, {**rival.fields, **fields, "seed": seed}))
    minutes = (time.perf_counter() - start) / 60
    stamp.write_text(f"{minutes}")
    return minutes


def recipe_of(name: str, root: Path, out: Path, fields: Mapping[str, Any]) -> Recipe:
    """The recipe of a run.

    Args:
        name: key of `SETS`.
        root: folder of the set.
        out: folder that the run writes.
        fields: what differs from other rows.
    """
    chosen, length = SETS[name], SETS[name].max_length
    needs_rows = {"keep", "macs", "distill"} & set(fields)
    common: dict[str, Any] = {
        "model": starting_model(name, root),
        "batch": (1, 8),
        "seq": (length,),
        "seconds": 1.0,
        "max_length": length,
        **({"data": str(rows_file(name, root)), "metric": chosen.metric} if needs_rows else {}),
        **({"shapes": (f"1x{length}", f"8x{length}")} if fields.get("target") == "openvino" else {}),
        **({"statistics": root / "statistics"} if "macs" in fields else {}),
        **({"distill_steps": chosen.distill_steps, "batch_size": chosen.batch} if "distill" in fields else {}),
    }
    return Recipe(**{**common, **fields}, out=out)
