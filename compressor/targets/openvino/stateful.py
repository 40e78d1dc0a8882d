"""OpenVINO's engines of a model that generates, whose decoder keeps keys and values as states of a request.

The decoder of a decoder-only model is `openvino_model.xml`, which openvino-genai loads too: besides the inputs of the
graph it has `beam_idx` `[text]`, the text of the batch before whose keys and values each text continues. Keys and
values that an encoder computes stay inputs of the decoder.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import openvino
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from openvino.frontend.onnx import ConversionExtension

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds, Provider
from compressor.targets.caches import (
    DECODER,
    ENCODER,
    FINER,
    MASKS,
    POSITIONS,
    WEIGHTS,
    Caches,
    GeneratingModel,
    Sessions,
    missing_encoder,
)
from compressor.targets.openvino import session
from compressor.targets.openvino.batches import CompiledGraph, EngineRequest
from graph_passes import load, save
from graph_passes.flow.caches import cache_names
from graph_passes.passes import DropIdleCaches
from graph_passes.passes.fuse_cached_attention import FuseCachedAttention
from graph_passes.passes.quantize_weights import DOMAIN, OPERATOR

ALONE, _AFTER_ENCODER, _ENCODER = "openvino_model.xml", "decoder.xml", "encoder.xml"
"""Files of a decoder without an encoder, of a decoder that reads one, and of the encoder."""
_BEAMS = "beam_idx"
_TYPES = {4: openvino.Type.u4, 8: openvino.Type.u8}
"""Bits of rounded weights -> the type of their integers."""
_TOKENIZER_FILES = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")


def build_sessions(folder: Path, files: Iterable[str], sizes: Iterable[tuple[int, int]], threads: int | None) -> None:
    """Convert graphs, the decoder with its caches as states; see `Target.build_sessions`."""
    files = tuple(files)
    for name in files:
        path = folder / (_ENCODER if name == ENCODER else _AFTER_ENCODER if ENCODER in files else ALONE)
        _build(folder / name, path)


def round_weights(folder: Path, rounds: Callable[[ir.Model], ir.Model], out: Path) -> Path:
    """Convert the decoder with rounded weights; see `Target.round_weights`."""
    path = out / _decoder_of(folder).name
    graph = _build(folder / DECODER, path, rounds)
    require_integers(session.read_model(path), path, _rounded(graph))
    return path


def check_rounded(graph: Path) -> None:
    """Compile a graph with `MatMulNBits`; see `Target.check_rounded`."""
    require_integers(read_rounded(graph), graph, _rounded(load(graph)))


def _rounded(graph: ir.Model) -> int:
    return sum(node.op_type == OPERATOR for node in graph.graph)


def _build(onnx: Path, path: Path, rounds: Callable[[ir.Model], ir.Model] | None = None) -> ir.Model:
    """Convert a graph, whose attentions over caches become one operator each, which extends a state where it is.

    Args:
        path: the file to write; that of an encoder has no states.
        rounds: rounds the weights; None: they stay in floats.

    Returns:
        The graph that was converted.
    """
    graph = DropIdleCaches()(load(onnx)).model  # a state that nothing reads fails in OpenVINO 2026.4
    inputs = [str(value.name) for value in graph.graph.inputs if not value.is_initializer()]
    caches, outputs = cache_names(graph), [str(value.name) for value in graph.graph.outputs]
    states = {past: present for past, present in caches.items() if present in outputs}
    info: dict[str, Any] = {
        "inputs": [name for name in inputs if name not in states],
        "outputs": [name for name in outputs if name not in states.values()],
        "encoded": {past: present for past, present in caches.items() if past not in states},
    }
    FuseCachedAttention(folds_queries=False)(graph)
    graph = graph if rounds is None else rounds(graph)
    with tempfile.TemporaryDirectory(prefix=".openvino-", dir=path.parent) as scratch:
        save(graph, Path(scratch) / onnx.name)
        model = read_rounded(Path(scratch) / onnx.name)
    if onnx.name == DECODER:
        _keep_states(model, inputs, states)
        info |= {"bytes_per_token": _bytes_per_token(model), "inputs": [*info["inputs"], _BEAMS]}
        info |= {name: graph.metadata_props[name] for name in (WEIGHTS, FINER) if name in graph.metadata_props}
        # The default rounds the keys and values to 8 bits.
        model.set_rt_info("f32", ["runtime_options", "KV_CACHE_PRECISION"])
    session.write_model(model, path, info)
    return graph


def _keep_states(model: openvino.Model, inputs: Iterable[str], states: Mapping[str, str]) -> None:
    """Make caches states of a model, which `beam_idx` selects the texts of before each call.

    `inputs` are those of the graph, in order, and `states` the output that is the next content of each cache.
    """
    parameters = dict(zip(inputs, model.get_parameters(), strict=True))
    _widen_states(model, [parameters[name] for name in states], set(states.values()))
    beams = ops.parameter([-1], np.int32, name=_BEAMS)
    beams.output(0).set_names({_BEAMS})
    batch = ops.gather(ops.shape_of(parameters["input_ids"]), ops.constant([0]), ops.constant(0))
    for name in states:
        readers = parameters[name].output(0).get_target_inputs()
        selected = ops.gather(parameters[name], beams, ops.constant(0))
        for reader in readers:
            reader.replace_source_output(selected.output(0))
    model.add_parameters([beams])
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, dict(states))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, width = node.get_output_partial_shape(0)
            sizes = [ops.constant([size]) for size in (heads.get_length(), 0, width.get_length())]
            empty = ops.constant(0, node.get_output_element_type(0))
            node.set_arguments([ops.broadcast(empty, ops.concat([batch, *sizes], 0)).output(0)])
    model.validate_nodes_and_infer_types()


def _widen_states(model: openvino.Model, caches: Iterable[openvino.Node], outputs: Set[str]) -> None:
    """Hold keys and values in float32, in which OpenVINO computes on processors.

    OpenVINO does not fuse attention over states in half precision, and the first call with them fails.
    """
    for cache in caches:
        if (stored := cache.get_element_type()) != openvino.Type.f32:
            readers = cache.output(0).get_target_inputs()
            cache.set_element_type(openvino.Type.f32)
            narrow = ops.convert(cache, stored)
            for reader in readers:
                reader.replace_source_output(narrow.output(0))
    for result in model.get_results():
        content = result.input_value(0)
        if (names := outputs & content.get_names()) and content.get_element_type() != openvino.Type.f32:
            content.set_names(content.get_names() - names)
            wide = ops.convert(content, np.float32).output(0)
            wide.set_names(names)
            result.input(0).replace_source_output(wide)
    model.validate_nodes_and_infer_types()


def _bytes_per_token(model: openvino.Model) -> int:
    states = (node.output(0) for node in model.get_ops() if node.get_type_name() == "ReadValue")
    shapes = ((state.get_partial_shape(), state.get_element_type().size) for state in states)
    return sum(shape[1].get_length() * shape[3].get_length() * size for shape, size in shapes)


def read_rounded(path: Path) -> openvino.Model:
    """A graph in ONNX, whose products by rounded weights read integers, scales and a zero point.

    OpenVINO's own reader of `MatMulNBits` moves the weights behind operators that are folded when the graph is
    compiled, which turns the weights into floats, and it reads none of 8 bits.

    Raises:
        InputError: OpenVINO cannot read it.
    """
    core = openvino.Core()
    core.add_extension(ConversionExtension(OPERATOR, DOMAIN, _product))
    return session.read_model(path, core)


def _product(node: Any) -> list[openvino.Output]:
    """A `MatMulNBits` in operators of OpenVINO. With the zero point in the type of the integers, its kernels round
    activations to 8 bits where the processor has dot products of them.
    """
    activations, packed, scales = (node.get_input(number) for number in range(3))
    bits, inputs, block = (node.get_attribute(name) for name in ("bits", "K", "block_size"))
    outputs, blocks, _ = packed.get_shape()
    shape = openvino.Shape([outputs, blocks, block])
    content = openvino.Tensor(np.ascontiguousarray(packed.get_node().data), shape, _TYPES[bits])
    integers = openvino.op.Constant(content, shared_memory=False)
    zero = ops.constant(2 ** (bits - 1), _TYPES[bits])
    centred = ops.subtract(*(ops.convert(value, np.float32) for value in (integers, zero)))
    floats = ops.multiply(centred, ops.reshape(scales, ops.constant([outputs, blocks, 1]), False))
    matrix = ops.reshape(floats, ops.constant([outputs, blocks * block]), False)
    if padding := blocks * block - inputs:  # the last block is padded with zeros
        before = [0] * activations.get_partial_shape().rank.get_length()
        ends = ops.constant(before), ops.constant([*before[1:], padding])
        activations = ops.pad(activations, *ends, "constant", ops.constant(np.float32(0))).output(0)
    return [ops.matmul(activations, matrix, False, True).output(0)]


def require_integers(model: openvino.Model, path: Path, count: int) -> None:
    """Check that OpenVINO keeps the integers of rounded weights on this processor, which it may turn into floats.

    Args:
        count: number of its matmuls with rounded weights.

    Raises:
        InputError: OpenVINO keeps the integers of fewer matmuls.
    """
    types = {kind.get_type_name() for kind in _TYPES.values()}
    layers = session.executed_layers(session.compile_model(model, path, session.session_settings(None)))
    kept = sum(layer.kind == "FullyConnected" and layer.precision in types for layer in layers)
    if kept < count:
        text = (
            f"{path}: on this processor OpenVINO keeps the integers of {kept} of {count} matmuls with rounded weights,"
            " and turns the rest into floats; use --target ort, or --precision fp32"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED, path=path, count=kept, needed=count)


def write_tokenizer(folder: Path, model: GeneratingModel) -> str | None:
    """Write the tokenizer of a decoder-only model.

    Args:
        folder: the folder of the engine.

    Returns:
        Why openvino-genai cannot load the folder, or not from texts; None: it can.
    """
    if not (folder / ALONE).is_file() or model.config.get("is_encoder_decoder"):
        return "it runs no encoder-decoder models from these graphs"
    if model.tokenizer is None:
        return "the model has no tokenizer; pass ids and not texts"
    try:
        from openvino_tokenizers import convert_tokenizer
    except ImportError:
        return (
            "the tokenizer is not converted: pip install openvino-tokenizers, and convert_tokenizer OUT"
            " --with-detokenizer -o OUT"
        )
    try:
        parts = convert_tokenizer(model.tokenizer, with_detokenizer=True)
    except Exception as error:  # of any tokenizer
        return f"openvino-tokenizers cannot convert the tokenizer ({one_line(error)}); pass ids and not texts"
    for file, part in zip(_TOKENIZER_FILES, parts, strict=True):
        openvino.save_model(part, folder / file)
    return None


def open_sessions(
    folder: Path, *, provider: Provider | None, threads: int | None, decoder: Path | None
) -> OpenVinoSessions:
    """Load the engines of a folder; see `Target.open_sessions`."""
    return OpenVinoSessions(folder, threads=threads, decoder=decoder)


def _decoder_of(folder: Path) -> Path:
    """The engine of the decoder in a folder; raises InputError if there is none."""
    path = next((folder / name for name in (ALONE, _AFTER_ENCODER) if (folder / name).is_file()), None)
    if path is None:
        text = f"{folder}: has neither {ALONE} nor {_AFTER_ENCODER}; copy the whole folder of the run again"
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=folder / ALONE)
    return path


@dataclasses.dataclass(frozen=True)
class OpenVinoCaches(Caches):
    """Caches in the state of a request, or a copy of it.

    Attributes:
        length, sources: see `Caches`.
        sessions: the owner of the request.
        version: number of the state that the caches belong to; each call starts a new state.
        order: index in that state of the keys and values of each text.
        encoded: input of the decoder -> keys or values of the encoder, for the texts that it has read.
        saved: state -> its content, where the caches are a copy.
    """

    length: int
    sources: np.ndarray
    sessions: OpenVinoSessions
    version: int
    order: np.ndarray
    encoded: Mapping[str, np.ndarray]
    saved: Mapping[str, np.ndarray] | None = None

    def select(self, indices: np.ndarray) -> OpenVinoCaches:
        """See `Caches.select`."""
        sources, encoded = self.sources[indices], self.encoded
        if not np.array_equal(sources, self.sources):  # else a beam search reorders the texts of each source
            encoded = {name: array[indices] for name, array in encoded.items()}
        order = self.order[indices] if self.length else np.arange(len(indices))
        return dataclasses.replace(self, sources=sources, order=order, encoded=encoded)

    def copy(self) -> OpenVinoCaches:
        """See `Caches.copy`."""
        saved = self.sessions.read_state(self.version) if self.saved is None and self.length else self.saved
        return dataclasses.replace(self, version=self.sessions.new_version(), saved=saved)

    def load(self) -> None:
        """See `Caches.load`."""
        self.sessions.load(self)


class OpenVinoSessions(Sessions):
    """The engines of a folder in OpenVINO. Only one thread at a time may use them.

    Args:
        threads: threads per call; None: one per core.
        decoder: the file of the decoder; None: the one of the folder.

    Attributes:
        request: runs the decoder, and holds the state.

    Raises:
        InputError: an engine is missing or cannot be loaded.
    """

    def __init__(self, folder: Path, *, threads: int | None = None, decoder: Path | None = None) -> None:
        self.path = path = decoder or _decoder_of(folder)
        self.settings = session.session_settings(threads)
        model = session.read_model(path)
        info = session.stored_info(model)
        self.bytes_per_token, self._encoded = info["bytes_per_token"], info["encoded"]
        self.vocabulary = model.outputs[0].partial_shape[-1].get_length()
        self.precision, self.finer = info.get(WEIGHTS, "fp32"), tuple(json.loads(info.get(FINER, "[]")))
        self.request, self._graph = self._open(model, path)
        self._encoder = None
        if (encoder := folder / _ENCODER).is_file() and path.name == _AFTER_ENCODER:
            _, self._encoder = self._open(session.read_model(encoder), encoder)
        elif self._encoded:
            raise missing_encoder(encoder, path.name)
        self._version, self._versions = 0, 0

    def _open(self, model: openvino.Model, path: Path) -> tuple[openvino.InferRequest, CompiledGraph]:
        request = session.compile_model(model, path, self.settings).create_infer_request()
        engine = EngineRequest(request)
        return request, session.open_graph(model, lambda: engine)

    def start(self, batch: int) -> OpenVinoCaches:
        """See `Sessions.start`."""
        return OpenVinoCaches(0, np.arange(batch), self, self.new_version(), np.arange(batch), {})

    def encode(self, inputs: Feeds) -> OpenVinoCaches:
        """See `Sessions.encode`."""
        empty = self.start(len(next(iter(inputs.values()))))
        if self._encoder is None:  # no cross-attention has heads
            return empty
        outputs = session.run_graph(self._encoder, inputs)
        encoded = {name: outputs[output] for name, output in self._encoded.items()}
        return dataclasses.replace(empty, encoded=encoded)

    def decode(
        self, input_ids: np.ndarray, mask: np.ndarray | None, position_ids: np.ndarray | None, caches: Caches
    ) -> tuple[np.ndarray, OpenVinoCaches]:
        """See `Sessions.decode`."""
        assert isinstance(caches, OpenVinoCaches)
        caches.load()
        feeds = {"input_ids": input_ids, **dict.fromkeys(MASKS, mask), POSITIONS: position_ids, **caches.encoded}
        arrays = {name: array for name, array in feeds.items() if array is not None}
        arrays[_BEAMS] = caches.order.astype(np.int32)
        self._version = self.new_version()  # a call that fails changes the state too
        logits = session.run_graph(self._graph, arrays)["logits"]
        return logits, dataclasses.replace(
            caches,
            length=caches.length + input_ids.shape[1],
            version=self._version,
            order=np.arange(len(input_ids)),
            saved=None,
        )

    def new_version(self) -> int:
        """The number of a new state."""
        self._versions += 1
        return self._versions

    def read_state(self, version: int) -> dict[str, np.ndarray]:
        """The content of the state of a version, by the names of its parts.

        Raises:
            InputError: a later call has replaced it.
        """
        self._require(version)
        return {part.name: part.state.data.copy() for part in self.request.query_state()}

    def load(self, caches: OpenVinoCaches) -> None:
        """Make caches the state of the request; see `Caches.load`."""
        if caches.version == self._version:
            return
        if caches.length and caches.saved is None:
            self._require(caches.version)
        self.request.reset_state()
        if caches.saved is not None:
            for part in self.request.query_state():
                part.state = openvino.Tensor(caches.saved[part.name])
        self._version = caches.version

    def _require(self, version: int) -> None:
        if version != self._version:
            text = "a later call has extended these caches; copy them before that call (Caches.copy)"
            raise InputError(text, code=ErrorCode.UNSUPPORTED)
