"""Files, arrays and flags that a run of a graph cannot use: exit code, error code and fields, and no file is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import ErrorCode, InputError
from compressor.model_folder import load
from graph_passes import GraphErrorCode
from tests import folders
from tests.command import compress
from tests.graph.files import LENGTH, TEXT_INPUTS, arrays, classifier, image_classifier, npz, texts
from tests.tasks import pictures

Fault = Callable[[Path], list[str | Path]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a classifier."""
    return classifier(tmp_path_factory.mktemp("whole") / "model.onnx").read_bytes()


@pytest.fixture
def inputs(tmp_path: Path, whole: bytes) -> Path:
    """A folder with a graph and its rows."""
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(whole)
    npz(folder / "rows.npz", **arrays())
    texts(folder / "rows.tsv")
    return folder


def run(inputs: Path, *flags: str | Path, rows: str = "rows.npz", budget: bool = True) -> list[str | Path]:
    return [inputs / "model.onnx", "--data", inputs / rows, *(["--macs", "60%"] if budget else []), *flags]


def edited(inputs: Path, edit: Callable[[onnx.GraphProto], object], opset: int | None = None) -> list[str | Path]:
    """The command on a changed graph."""
    model = onnx.load(inputs / "model.onnx")
    edit(model.graph)
    if opset is not None:
        model.opset_import[0].version = opset
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    onnx.save(model, inputs / "model.onnx")
    return run(inputs)


def with_last(*nodes: onnx.NodeProto, **constants: Any) -> Callable[[onnx.GraphProto], None]:
    """Add nodes that compute `logits` from `before`."""

    def edit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.output[:] = ["before" if name == "logits" else name for name in node.output]
        graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
        graph.node.extend(nodes)

    return edit


def _branch(name: str, operator: str) -> onnx.GraphProto:
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node(operator, ["before"], [name])], name, [], [output])


def quantized_weight(graph: onnx.GraphProto) -> None:
    weights = {tensor.name: tensor for tensor in graph.initializer}
    node = next(node for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights)
    values = numpy_helper.to_array(weights[node.input[1]])
    scale = np.array(np.abs(values).max() / 127, np.float32)
    graph.initializer.append(numpy_helper.from_array(np.round(values / scale).astype(np.int8), "stored"))
    graph.initializer.append(numpy_helper.from_array(scale, "scale"))
    graph.node.insert(0, helper.make_node("DequantizeLinear", ["stored", "scale"], ["restored"], "restore"))
    node.input[1] = "restored"


def dynamic_product(graph: onnx.GraphProto) -> None:
    node = helper.make_node("DynamicQuantizeLinear", ["before"], ["a", "b", "c"], "quantize")
    with_last(node, helper.make_node("Identity", ["before"], ["logits"]))(graph)


def past(graph: onnx.GraphProto) -> None:
    axes: list[str | int | None] = ["batch", 2, "past", 8]
    graph.input.append(helper.make_tensor_value_info("past_key_values.0.key", TensorProto.FLOAT, axes))


def integers_alone(graph: onnx.GraphProto) -> None:
    with_last(helper.make_node("ArgMax", ["before"], ["logits"], axis=1))(graph)
    graph.output[0].CopyFrom(helper.make_tensor_value_info("logits", TensorProto.INT64, None))


def fixed_rows(graph: onnx.GraphProto) -> None:
    for value in graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 1


def fixed_tokens(graph: onnx.GraphProto) -> None:
    for value in graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = LENGTH


def sequence(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("SequenceConstruct", ["logits"], ["parts"]))
    graph.output.append(helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None))


def one_number(graph: onnx.GraphProto) -> None:
    with_last(helper.make_node("ReduceSum", ["before"], ["logits"], keepdims=0))(graph)
    graph.output[0].CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, []))


def no_graph(inputs: Path) -> list[str | Path]:
    (inputs / "model.onnx").write_bytes(b"no graph")
    return run(inputs)


def stored_outside(inputs: Path, target: str, keep: bool) -> list[str | Path]:
    """The weights in a data file, which is moved or removed."""
    onnx.save(onnx.load(inputs / "model.onnx"), inputs / "model.onnx", save_as_external_data=True, location="weights")
    (inputs / "inner").mkdir()
    model = onnx.load(inputs / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = target
    (inputs / "inner" / "model.onnx").write_bytes(model.SerializeToString())
    if not keep:
        (inputs / "weights").unlink()
    return [inputs / "inner" / "model.onnx", *run(inputs)[1:]]


def plain_layer(inputs: Path) -> list[str | Path]:
    """A linear classifier, of which nothing can be removed."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    weight = numpy_helper.from_array(np.ones((8, 3), np.float32), "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["logits"], "layer")], "g", [x], [y], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, inputs / "model.onnx")
    npz(inputs / "rows.npz", x=np.ones((20, 8), np.float32))
    return run(inputs)


def without_numbers(graph: onnx.GraphProto) -> None:
    """Weights of a model whose training diverged."""
    matrix = next(
        tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2
    )
    matrix.CopyFrom(numpy_helper.from_array(np.full(matrix.dims, np.nan, np.float32), matrix.name))


def with_arrays(**changes: Any) -> Fault:
    """The command on arrays some of which are replaced, or left out (None)."""

    def fault(inputs: Path) -> list[str | Path]:
        values = {**arrays(), **{name: change for name, change in changes.items() if not callable(change)}}
        values |= {name: change(values[name]) for name, change in changes.items() if callable(change)}
        npz(inputs / "rows.npz", **{name: value for name, value in values.items() if value is not None})
        return run(inputs)

    return fault


def with_flags(*flags: str) -> Fault:
    """The command with flags; a share of blocks takes the place of a budget."""
    return lambda inputs: run(inputs, *flags, budget="blocks" not in flags[0])


def outside_of_table(inputs: Path) -> list[str | Path]:
    """A tokenizer with more tokens than the table of the graph."""

    tokenizer = folders.tokenizer()
    tokenizer.add_tokens(["film"])
    tokenizer.add_tokens(["novel"])
    tokenizer.save_pretrained(inputs / "tokenizer")
    (inputs / "rows.tsv").write_text("label\ttext\n" + "0\tgood\n1\tbad novel\n" * 12)
    return run(inputs, "--tokenizer", inputs / "tokenizer", rows="rows.tsv")


def images_alone(inputs: Path) -> list[str | Path]:
    """Images, and a graph without the file that says how they become its input."""
    image_classifier(inputs, has_processor=False)
    return [*run(inputs)[:2], pictures.write_folder(inputs / "images", 12), *run(inputs)[3:]]


UNSUPPORTED = ErrorCode.UNSUPPORTED_MODEL
BAD: dict[str, tuple[Fault, int, Any, dict[str, Any]]] = {
    "no graph": (no_graph, 3, GraphErrorCode.FILE_UNREADABLE, {}),
    "no weights": (lambda i: stored_outside(i, "weights", False), 3, GraphErrorCode.FILE_MISSING, {}),
    "weights elsewhere": (lambda i: stored_outside(i, "../weights", True), 3, GraphErrorCode.UNSAFE_PATH, {}),
    "own operator": (
        lambda i: edited(i, with_last(helper.make_node("Own", ["before"], ["logits"], "own", domain="com.example"))),
        *(3, UNSUPPORTED, {"node": "own", "op_type": "com.example.Own"}),
    ),
    "operator that does not run": (
        lambda i: edited(i, with_last(helper.make_node("Det", ["before"], ["logits"], "det"))),
        *(3, ErrorCode.TENSOR_MISMATCH, {}),
    ),
    "weights in int8": (lambda i: edited(i, quantized_weight), 3, UNSUPPORTED, {"node": "restore"}),
    "dynamic int8": (lambda i: edited(i, dynamic_product), 3, UNSUPPORTED, {"node": "quantize"}),
    "old operators": (lambda i: edited(i, lambda graph: None, opset=9), 3, UNSUPPORTED, {"opset": 9}),
    "a sequence": (lambda i: edited(i, sequence), 3, UNSUPPORTED, {"tensor": "parts"}),
    "an output that nothing computes": (
        lambda i: edited(i, lambda graph: graph.node.remove(graph.node[-1])),
        *(3, GraphErrorCode.FILE_UNREADABLE, {"tensor": "logits"}),
    ),
    "past": (lambda i: edited(i, past), 3, UNSUPPORTED, {"input": "past_key_values.0.key"}),
    "no floats": (lambda i: edited(i, integers_alone), 3, UNSUPPORTED, {"outputs": "logits"}),
    "two inputs of one name": (
        lambda i: edited(i, lambda graph: graph.input.append(graph.input[0])),
        *(3, GraphErrorCode.FILE_UNREADABLE, {"tensor": "input_ids"}),
    ),
    "two outputs of one name": (
        lambda i: edited(i, lambda graph: graph.output.append(graph.output[0])),
        *(3, GraphErrorCode.FILE_UNREADABLE, {"tensor": "logits"}),
    ),
    "a number of rows": (lambda i: edited(i, fixed_rows), 3, UNSUPPORTED, {"input": "input_ids"}),
    "a number of tokens": (
        lambda i: [*edited(i, fixed_tokens)[:2], i / "rows.tsv", "--macs", "60%"],
        *(3, UNSUPPORTED, {"input": "input_ids"}),
    ),
    "one number": (lambda i: edited(i, one_number), 3, UNSUPPORTED, {"outputs": ("logits",), "metric": None}),
    "weights that are no numbers": (
        lambda i: edited(i, without_numbers),
        *(3, ErrorCode.NOT_FINITE, {"output": "logits"}),
    ),
    "another metric": (
        lambda i: run(i, "--metric", "spearman"),
        *(3, UNSUPPORTED, {"outputs": ("logits",), "metric": "spearman"}),
    ),
    "nothing to remove": (plain_layer, 3, UNSUPPORTED, {"obstacles": ()}),
    "an array less": (with_arrays(attention_mask=None), 3, ErrorCode.COLUMN_MISSING, {"input": "attention_mask"}),
    "an array more": (with_arrays(more=arrays()["input_ids"]), 3, ErrorCode.UNKNOWN_NAME, {"array": "more"}),
    "another type": (
        with_arrays(input_ids=lambda ids: ids.astype(np.float32)),
        *(3, ErrorCode.TENSOR_MISMATCH, {"array": "input_ids"}),
    ),
    "another number of rows": (
        with_arrays(attention_mask=lambda mask: mask[:7]),
        *(3, ErrorCode.INVALID_ROWS, {"array": "attention_mask"}),
    ),
    "ids outside of the table": (
        with_arrays(input_ids=lambda ids: ids + 100),
        *(3, ErrorCode.ID_OUTSIDE_TABLE, {"array": "input_ids"}),
    ),
    "too many positions": (
        with_arrays(**dict.fromkeys(TEXT_INPUTS, np.ones((20, 50), np.int64))),
        *(3, ErrorCode.TENSOR_MISMATCH, {}),
    ),
    "rows without numbers": (
        with_arrays(**dict.fromkeys(TEXT_INPUTS, np.ones((20, 0), np.int64))),
        *(3, ErrorCode.TENSOR_MISMATCH, {"array": "input_ids"}),
    ),
    "no tokenizer": (lambda i: run(i, rows="rows.tsv"), 3, ErrorCode.FILE_MISSING, {"field": "tokenizer"}),
    "tokens outside of the table": (outside_of_table, 3, ErrorCode.ID_OUTSIDE_TABLE, {"input": "input_ids", "id": 25}),
    "no image processor": (images_alone, 3, ErrorCode.FILE_MISSING, {"inputs": ("pixel_values",)}),
    "task of arrays": (lambda i: run(i, "--task", "fill-mask"), 2, ErrorCode.CONTRADICTION, {"field": "task"}),
    **{
        flags[0]: (with_flags(*flags), 2, ErrorCode.CONTRADICTION, {})
        for flags in (
            ("--drop-blocks", "50%"),
            ("--attention", "sdpa"),
            ("--opset", "23"),
            ("--no-pool-in-graph",),
            ("--trust-remote-code",),
            ("--allow-pickle",),
        )
    },
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_run_of_a_file_cannot_use(name: str, inputs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fault, exit_code, code, details = BAD[name]
    result = compress(capfd, *fault(inputs), "-o", inputs.parent / "out", "--quiet")
    assert (result.code, result.error_code, result.out) == (exit_code, code, "")
    assert {key: result.details[key] for key in details} == details
    assert len(result.error) < 500
    assert [path.name for path in inputs.parent.iterdir()] == ["place"]


def test_a_tokenizer_is_for_graphs(inputs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (inputs / "model").mkdir()
    (inputs / "model" / "model.safetensors").touch()
    result = compress(capfd, inputs / "model", "--tokenizer", inputs, "-o", inputs.parent / "out")
    assert (result.code, result.error_code) == (2, ErrorCode.CONTRADICTION)
    assert result.details["fields"] == ("tokenizer", "model")


def test_a_file_that_changes_is_not_written_back(inputs: Path) -> None:
    file = inputs / "model.onnx"
    network: Any = load(file, rows=arrays()).model
    network.with_weights()
    model = onnx.load(file)
    model.graph.node[0].name += "_"
    onnx.save(model, file)
    with pytest.raises(InputError) as error:
        network.with_weights()
    assert error.value.code == ErrorCode.FILE_MISMATCH
    assert error.value.details["path"] == file


def test_inputs_need_no_names_of_python(tmp_path: Path, whole: bytes) -> None:
    names = ("input.1", "mask:0")
    file = classifier(tmp_path / "model.onnx", inputs=names)
    rows = arrays(inputs=names)
    model: Any = load(file, rows=rows).model
    assert list(model.input_specs) == list(names)
    assert model.input_specs["input.1"].ids == 25
