"""ONNX Runtime's sessions of a model that generates; keys and values stay in its memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import onnxruntime as ort

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.targets.base import BuildOptions, Feeds, Provider, missing_input, span
from compressor.targets.caches import (
    DECODER,
    ENCODER,
    FINER,
    MASKS,
    PADDING,
    PLAN,
    POSITIONS,
    WEIGHTS,
    Caches,
    Sessions,
    missing_encoder,
    require_decoder,
    require_one_plan,
)
from compressor.targets.onnxruntime import ort_session
from graph_passes.flow.caches import CACHES, IN_PLACE

if TYPE_CHECKING:
    import onnx_ir as ir

_Device = TypeVar("_Device", bound=str)
_ROOM = 64
"""Positions to allocate after those of a prompt; whenever they are filled, the memory is doubled."""
CHOICE_SECONDS = 1.0
"""Maximum time spent on choosing the form of an operator."""


def engine_of(graph: Path) -> Path:
    """The file of ONNX Runtime's engine of a graph, beside it."""
    return graph.with_name(f"{graph.stem}.engine.onnx")


def choose_file(
    source: Path, graph: Path, metadata: Mapping[str, str], device: _Device, requested: str | None
) -> tuple[_Device | Literal["cpu"], Path]:
    """The device and the file to run: an engine that writes its caches in place runs on the CPU only.

    Args:
        source: the engine, if there is one, else the graph.
        graph: the graph, whose weights are in floats.
        metadata: metadata of `source`.
        device: the preferred device.
        requested: name of the option that requests the device; None: the CPU may replace it.

    Raises:
        UsageError: the requested device does not run the rounded weights of the engine.
    """
    if device == "cpu" or IN_PLACE not in metadata:
        return device, source
    if WEIGHTS not in metadata:
        return device, graph
    if requested is None:
        return "cpu", source
    raise UsageError(
        f"--{requested}: the engine with rounded weights ({metadata[WEIGHTS]}) runs on the CPU; omit --{requested}, or "
        f"use floats (compress with --precision fp32, or serve with --plain)",
        code=ErrorCode.CONTRADICTION,
        field=requested,
        value=device,
    )


def build_sessions(folder: Path, files: Iterable[str], sizes: Iterable[tuple[int, int]], threads: int | None) -> None:
    """Build the engine of each graph beside it, with attention over caches as one operator where that is faster.

    See `Target.build_sessions`.
    """
    from compressor.targets.onnxruntime.engine import build_engine  # a server that generates builds nothing

    batches, lengths = zip(*sizes, strict=True)
    options = BuildOptions(batch=span(batches), seq=span(lengths), norm_seconds=CHOICE_SECONDS)
    for path in (folder / name for name in files):
        build_engine(path, engine_of(path), provider="cpu", threads=threads, options=options)


def round_weights(folder: Path, rounds: Callable[[ir.Model], ir.Model], out: Path) -> Path:
    """Round the weights of the engine in fp32, whose operators are fused; see `Target.round_weights`."""
    from graph_passes import load, save  # a server that generates rounds nothing
    from graph_passes.passes import JoinProducts, PackAttention

    engine = engine_of(folder / DECODER)
    save(PackAttention()(JoinProducts()(rounds(load(engine)))).model, out / engine.name)
    return out / engine.name


def check_rounded(graph: Path) -> None:
    """Load a graph with `MatMulNBits`, which only some packages of ONNX Runtime have; see `Target.check_rounded`."""
    ort_session.unoptimized_runner(graph)


def open_sessions(folder: Path, *, provider: Provider | None, threads: int | None, decoder: Path | None) -> OrtSessions:
    """Load the engines of a folder, or its graphs where it has no engines; see `Target.open_sessions`."""
    return OrtSessions(folder, provider=provider, threads=threads, decoder=decoder)


class _Memory:
    """Keys and values of a decoder, with room for further positions, which the graph writes where they belong.

    Attributes:
        arrays: name of an input of the decoder -> keys or values `[text, head, position, width]`.
        room: number of positions that there is memory for.
        filled: number of positions that are written.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays, self.filled = arrays, 0
        self.room = next(iter(arrays.values())).shape[2]
        self._binding: ort.IOBinding | None = None

    def binding(self, session: ort.InferenceSession, outputs: Mapping[str, str]) -> ort.IOBinding:
        """What binds each tensor as an input of a decoder and as the output of a name."""
        if self._binding is None:
            self._binding = session.io_binding()
            for name, array in self.arrays.items():
                tensor = _tensor(array, "cpu")
                self._binding.bind_ortvalue_input(name, tensor)
                self._binding.bind_ortvalue_output(outputs[name], tensor)
        return self._binding

    def text(self, index: int) -> _Memory:
        """The memory of one text, which is not copied."""
        return _Memory({name: array[index : index + 1] for name, array in self.arrays.items()})

    def copy(self, indices: np.ndarray, length: int, room: int) -> _Memory:
        """The first positions of some texts, in memory with room for a number of positions."""
        arrays = {}
        for name, array in self.arrays.items():
            _, heads, _, width = array.shape
            arrays[name] = np.empty((len(indices), heads, room, width), array.dtype)
            for text, index in enumerate(indices):
                arrays[name][text, :, :length] = array[index, :, :length]
        copied = _Memory(arrays)
        copied.filled = length
        return copied


@dataclasses.dataclass(frozen=True)
class OrtCaches(Caches):
    """Caches in the memory of ONNX Runtime.

    Attributes:
        length, sources: see `Caches`.
        decoded: name of an input of the decoder -> keys or values `[text, head, position, width]` that it has computed;
            or the memory of all of them, whose first positions belong to these caches.
        encoded: name of an input of the decoder -> keys or values of the encoder, for the texts that it has read.
    """

    length: int
    sources: np.ndarray
    decoded: Mapping[str, ort.OrtValue] | _Memory
    encoded: Mapping[str, ort.OrtValue]

    def select(self, indices: np.ndarray) -> OrtCaches:
        """See `Caches.select`."""
        sources = self.sources[indices]
        # The texts of a beam search belong to one source, so what was encoded stays where it is.
        same = np.array_equal(sources, self.sources)
        encoded = self.encoded if same else _select(self.encoded, indices)
        decoded = self.decoded
        if not isinstance(decoded, _Memory):
            decoded = _select(decoded, indices)
        elif not np.array_equal(indices, np.arange(self.batch)):
            decoded = decoded.copy(indices, self.length, decoded.room)
        return OrtCaches(self.length, sources, decoded, encoded)

    def copy(self) -> OrtCaches:
        """Caches for one more call: in memory of their own where calls write to it, else these."""
        if not isinstance(self.decoded, _Memory):
            return self
        room = max(self.decoded.room, self.length + _ROOM)
        copied = self.decoded.copy(np.arange(self.batch), self.length, room)
        return dataclasses.replace(self, decoded=copied)


class OrtSessions(Sessions):
    """The graphs of a folder in ONNX Runtime, or the engines that were built from them.

    Args:
        folder: the folder with `decoder.onnx`, and `encoder.onnx` where the model has an encoder.
        provider: device to run on; None: CUDA where this machine has it and the weights can stay as they are, else the
            CPU.
        threads: threads per call; None: one per core.
        optimized: whether the runtime optimizes the graphs; else they run on the CPU as they are.
        decoder: the file of the decoder; None: the one of the folder.

    Attributes:
        constants: other values of some constants of the decoder that callers may replace, by name.

    Raises:
        InputError: a graph is missing, records no caches, belongs to another plan than the others, or cannot be loaded.
        TargetMissingError: the device is missing.
        UsageError: the device does not run the rounded weights of the engine.
    """

    def __init__(
        self,
        folder: Path,
        *,
        provider: Provider | None = None,
        threads: int | None = None,
        optimized: bool = True,
        decoder: Path | None = None,
    ) -> None:
        require_decoder(folder)

        def file_of(name: str) -> Path:
            engine = engine_of(folder / name)
            return engine if optimized and engine.is_file() else folder / name

        def open_on(device: Provider, path: Path) -> dict[str, str]:
            self._device, self.path, self.settings = device, path, ort_session.session_settings(device, threads)
            if not optimized:
                self.settings["graph_optimization"] = "none"
            self._decoder = ort_session.open_session(path, self.settings)
            return self._decoder.get_modelmeta().custom_metadata_map

        metadata = open_on(
            ort_session.choose_provider(provider, "fp32") if optimized else "cpu", decoder or file_of(DECODER)
        )
        requested = None if provider is None else "provider"
        runs = choose_file(self.path, folder / DECODER, metadata, self._device, requested)
        if runs != (self._device, self.path):
            metadata = open_on(*runs)
        self._inputs = {value.name: value for value in self._decoder.get_inputs()}
        recorded = metadata.get(CACHES)
        if recorded is None:
            text = (
                f"{folder / DECODER}: its metadata name no key/value caches; give the output folder of a run on a model"
                " that generates, whose graphs have caches"
            )
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=folder / DECODER)
        returned = {value.name for value in self._decoder.get_outputs()}
        caches = {name: output for name, output in json.loads(recorded) if name in self._inputs}
        self._decoded = {name: output for name, output in caches.items() if output in returned}
        self._encoded = {name: output for name, output in caches.items() if output not in returned}
        has_encoder = (folder / ENCODER).is_file()
        if self._encoded and not has_encoder:
            raise missing_encoder(folder / ENCODER, DECODER)
        self._encoder = ort_session.open_session(file_of(ENCODER), self.settings) if has_encoder else None
        opened = {DECODER: self._decoder} | ({} if self._encoder is None else {ENCODER: self._encoder})
        require_one_plan(
            folder, {name: session.get_modelmeta().custom_metadata_map.get(PLAN) for name, session in opened.items()}
        )
        self._logits = next(value for value in self._decoder.get_outputs() if value.name == "logits")
        self.vocabulary = int(self._logits.shape[-1])
        stored = "fp16" if self._logits.type == "tensor(float16)" else "fp32"
        self.precision, self.finer = metadata.get(WEIGHTS, stored), tuple(json.loads(metadata.get(FINER, "[]")))
        self._pads_right, self._in_place = PADDING in metadata, IN_PLACE in metadata
        values = [self._inputs[name] for name in self._decoded]
        self.bytes_per_token = sum(value.shape[1] * value.shape[3] * _dtype(value).itemsize for value in values)
        self.constants = dict[str, np.ndarray]()

    def start(self, batch: int) -> OrtCaches:
        """See `Sessions.start`."""
        arrays = {}
        for name in self._decoded:  # layers differ in their numbers of heads
            value = self._inputs[name]
            _, heads, _, width = value.shape
            arrays[name] = np.empty((batch, heads, 0, width), _dtype(value))
        if self._in_place:
            return OrtCaches(0, np.arange(batch), _Memory(arrays), {})
        decoded = {name: _tensor(array, self._device) for name, array in arrays.items()}
        return OrtCaches(0, np.arange(batch), decoded, {})

    def encode(self, inputs: Feeds) -> OrtCaches:
        """See `Sessions.encode`."""
        if self._encoder is None:  # no cross-attention has heads
            return self.start(len(next(iter(inputs.values()))))
        feeds = {value.name: inputs[value.name] for value in self._encoder.get_inputs() if value.name in inputs}
        outputs = self._run(self._encoder, feeds, {}, list(self._encoded.values()))
        encoded = {name: outputs[output] for name, output in self._encoded.items()}
        return dataclasses.replace(self.start(len(next(iter(feeds.values())))), encoded=encoded)

    def decode(
        self, input_ids: np.ndarray, mask: np.ndarray | None, position_ids: np.ndarray | None, caches: Caches
    ) -> tuple[np.ndarray, OrtCaches]:
        """See `Sessions.decode`."""
        assert isinstance(caches, OrtCaches)
        if self._pads_right and mask is not None and not mask[:, 0].all():
            text = (
                f"{self.path}: its attention supports no padding on the left, which texts of different lengths need;"
                " pass texts of equal length, or one text at a time (--batch-size 1)"
            )
            raise InputError(text, code=ErrorCode.UNSUPPORTED, path=self.path)
        length = caches.length + input_ids.shape[1]
        if self._in_place and POSITIONS not in self._inputs:
            self._require_places(np.ones((len(input_ids), length)) if mask is None else mask, position_ids)
        feeds = {"input_ids": input_ids, **dict.fromkeys(MASKS, mask), POSITIONS: position_ids}
        arrays = {name: array for name, array in feeds.items() if name in self._inputs and array is not None}
        arrays |= self.constants
        if isinstance(caches.decoded, _Memory):
            logits, memory = self._extend(arrays, caches.decoded, caches.length, length)
            return logits, dataclasses.replace(caches, length=length, decoded=memory)
        outputs = self._run(
            self._decoder, arrays, {**caches.decoded, **caches.encoded}, ["logits", *self._decoded.values()]
        )
        decoded = {name: outputs[output] for name, output in self._decoded.items()}
        logits = np.asarray(outputs["logits"].numpy(), np.float32)
        return logits, dataclasses.replace(caches, length=length, decoded=decoded)

    def _require_places(self, mask: np.ndarray, positions: np.ndarray | None) -> None:
        """Check that tokens have the numbers of their places after the padding on the left, by which the engine counts.

        `mask` is 1 for tokens `[text, position]`; `positions` are those of the new tokens, None where they are unknown.
        """
        is_token = mask != 0
        first = is_token.argmax(1)
        spans = (is_token.shape[1] - first - is_token[:, ::-1].argmax(1)) * is_token.any(1)
        if np.count_nonzero(is_token) < spans.sum():
            text = (
                "a text has padding between its tokens, which this engine would count as tokens; pad texts on the left"
            )
            raise InputError.of_file(self.path, text, ErrorCode.UNSUPPORTED)
        if positions is None:
            return
        is_new = is_token[:, -positions.shape[1] :]
        counted = np.arange(is_token.shape[1] - is_new.shape[1], is_token.shape[1]) - first[:, None]
        if (is_new & (positions != counted)).any():
            text = f"{POSITIONS} do not count the tokens of each text from 0, as this engine does; omit {POSITIONS}"
            raise InputError.of_file(self.path, text, ErrorCode.UNSUPPORTED)

    def _extend(self, arrays: Feeds, memory: _Memory, start: int, end: int) -> tuple[np.ndarray, _Memory]:
        """Logits of tokens, whose keys and values become positions `start` to `end` of a memory; and the memory."""
        batch = len(arrays["input_ids"])
        if memory.room < end or memory.filled != start:  # else another call went on from the same positions
            room = memory.room if memory.room >= end else max(end + _ROOM, 2 * memory.room)
            memory = memory.copy(np.arange(batch), start, room)
        if start and end - start > 1 and batch > 1:  # the operator then reads a single text
            texts = [{name: array[text : text + 1] for name, array in arrays.items()} for text in range(batch)]
            texts = [{**feeds, **self.constants} for feeds in texts]
            logits = np.concatenate(
                [self._write(feeds, memory.text(text), end - start) for text, feeds in enumerate(texts)]
            )
        else:
            logits = self._write(arrays, memory, end - start)
        memory.filled = end
        return logits, memory

    def _write(self, arrays: Feeds, memory: _Memory, new: int) -> np.ndarray:
        """Logits `[text, new position, token]` of a call that writes new keys and values into memory."""
        binding = memory.binding(self._decoder, self._decoded)
        logits = np.empty((len(arrays["input_ids"]), new, self.vocabulary), _dtype(self._logits))
        bound = self._bind_inputs(binding, self._decoder, arrays, memory.arrays)
        binding.bind_ortvalue_output(self._logits.name, _tensor(logits, "cpu"))
        ort_session.run_bound(self._decoder, binding)
        del bound
        return np.asarray(logits, np.float32)

    def _run(
        self, session: ort.InferenceSession, arrays: Feeds, caches: Mapping[str, ort.OrtValue], outputs: list[str]
    ) -> dict[str, ort.OrtValue]:
        """Outputs by name, of which only the logits leave the device."""
        binding = session.io_binding()
        bound = self._bind_inputs(binding, session, arrays, caches)
        for name, tensor in caches.items():
            binding.bind_ortvalue_input(name, tensor)
        for name in outputs:
            binding.bind_output(name, "cpu" if name == "logits" else self._device)
        ort_session.run_bound(session, binding)
        del bound
        return dict(zip(outputs, binding.get_outputs(), strict=True))

    def _bind_inputs(
        self, binding: ort.IOBinding, session: ort.InferenceSession, arrays: Feeds, caches: Collection[str]
    ) -> list[np.ndarray]:
        """Bind the inputs other than caches; returns the arrays whose memory the call reads."""
        replaced = [value for value in session.get_overridable_initializers() if value.name in arrays]
        bound = []
        for value in (*session.get_inputs(), *replaced):
            if value.name in arrays:
                array = np.ascontiguousarray(arrays[value.name], _dtype(value))
                binding.bind_ortvalue_input(value.name, _tensor(array, self._device))
                bound.append(array)
            elif value.name not in caches:
                raise missing_input(value.name, [known.name for known in session.get_inputs()])
        return bound


def _dtype(value: Any) -> np.dtype[Any]:
    """The type of an input, which reads like `tensor(float16)`."""
    name = value.type.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name))


def _tensor(array: np.ndarray, device: str) -> ort.OrtValue:
    """An array as a tensor of the runtime; on the CPU they share their memory."""
    return ort.OrtValue.ortvalue_from_numpy(array, device)


def _select(values: Mapping[str, ort.OrtValue], indices: np.ndarray) -> Mapping[str, ort.OrtValue]:
    """Some texts of each tensor."""
    first = next(iter(values.values()), None)
    if first is None or np.array_equal(indices, np.arange(first.shape()[0])):
        return values
    return {name: _tensor(value.numpy()[indices], value.device_name()) for name, value in values.items()}
