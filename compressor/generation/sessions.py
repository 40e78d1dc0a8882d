"""The graphs of a model that generates, as sessions of a runtime, and the keys and values that they keep.

`Sessions` is what a search of tokens needs of a runtime. Caches are tensors of the runtime: a search passes them from
one call to the next, and reads only how many positions they hold.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort

from compressor.errors import ErrorCode, InputError
from compressor.generation import DECODER, ENCODER, PLAN, WEIGHTS, engine_of, plan_digest
from compressor.targets.base import Feeds, Provider, missing_input
from compressor.targets.onnxruntime.ort_session import (
    PROVIDERS,
    choose_provider,
    error_line,
    open_session,
    session_settings,
)
from graph_passes.flow.caches import CACHES

_MASKS = ("attention_mask", "encoder_attention_mask")
"""Names of the mask of a decoder: over its own positions, or over those of the encoder."""
_REMEDY = "a run on a model that generates writes it into its output folder"


class Caches(ABC):
    """Keys and values of a batch of texts.

    Attributes:
        length: positions of the decoder that they hold.
        batch: number of texts.
    """

    length: int

    @property
    @abstractmethod
    def batch(self) -> int: ...

    @abstractmethod
    def select(self, indices: np.ndarray) -> Self:
        """The caches of some texts of the batch, by their indices `[text]`, of which each may be repeated."""


class Sessions(ABC):
    """The graphs of a model, loaded into a runtime.

    Attributes:
        vocabulary: number of logits of each position.
    """

    vocabulary: int

    @abstractmethod
    def start(self, batch: int) -> Caches:
        """The caches of a decoder-only model before the first token of `batch` texts."""

    @abstractmethod
    def encode(self, inputs: Feeds) -> Caches:
        """The caches of an encoder-decoder before the first token: keys and values of what the encoder has read.

        Args:
            inputs: `input_ids` and `attention_mask` `[text, position]`, or `input_features` `[text, channel, frame]`;
                inputs that the graph lacks are ignored.

        Raises:
            InputError: an input is missing, or the graph cannot run on these inputs.
        """

    @abstractmethod
    def decode(
        self, input_ids: np.ndarray, mask: np.ndarray | None, position_ids: np.ndarray | None, caches: Caches
    ) -> tuple[np.ndarray, Caches]:
        """Read further tokens.

        Args:
            input_ids: the tokens `[text, new position]`.
            mask: 1 for positions that are read, 0 for padding: `[text, earlier and new position]`, or those of the
                encoder `[text, source position]`; None where the graph has no mask.
            position_ids: number of each token in its text `[text, new position]`; None where the graph counts itself.
            caches: the earlier positions, which stay as they are.

        Returns:
            Logits `[text, new position, token]`, and the caches of earlier and new positions.

        Raises:
            InputError: an input is missing, or the graph cannot run on these inputs.
        """


@dataclasses.dataclass(frozen=True)
class OrtCaches(Caches):
    """Caches in the memory of ONNX Runtime.

    Attributes:
        length: see `Caches`.
        decoded: name of an input of the decoder -> keys or values `[text, head, position, width]` that it has computed.
        encoded: the same of the encoder, for the texts that it has read.
        sources: index of the text of the encoder that each text of the decoder belongs to.
    """

    length: int
    decoded: Mapping[str, ort.OrtValue]
    encoded: Mapping[str, ort.OrtValue]
    sources: np.ndarray

    @property
    def batch(self) -> int:
        """See `Caches`."""
        return len(self.sources)

    def select(self, indices: np.ndarray) -> OrtCaches:
        """See `Caches.select`."""
        sources = self.sources[indices]
        # The texts of a beam search belong to one source, so what was encoded stays where it is.
        same = np.array_equal(sources, self.sources)
        return OrtCaches(
            self.length,
            _select(self.decoded, indices),
            self.encoded if same else _select(self.encoded, indices),
            sources,
        )


class OrtSessions(Sessions):
    """The graphs of a folder in ONNX Runtime, or the engines that were built of them.

    Args:
        folder: the folder with `decoder.onnx`, and `encoder.onnx` where the model has an encoder.
        provider: device to run on; None: CUDA where this machine has it, else the CPU.
        threads: threads per call; None: one per core.
        optimized: whether the runtime optimizes the graphs; else they run on the CPU as they are.
        decoder: the file of the decoder; None: the one of the folder.

    Attributes:
        constants: other values of some constants of the decoder that callers may replace, by name.

    Raises:
        InputError: a graph is missing, records no caches, belongs to another plan than the others, or cannot be loaded.
        TargetMissingError: the device is missing.
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
        provider = choose_provider(provider, "fp32") if optimized else "cpu"
        settings = session_settings(provider, threads) | ({} if optimized else {"graph_optimization": "none"})
        self._device = "cpu" if settings["provider"] == PROVIDERS["cpu"] else "cuda"
        if not (folder / DECODER).is_file():
            raise InputError(
                f"{folder}: has no {DECODER}, the graph that generates; {_REMEDY}",
                code=ErrorCode.FILE_MISSING,
                path=folder / DECODER,
            )

        def open_graph(name: str) -> ort.InferenceSession:
            engine = engine_of(folder / name)
            return open_session(engine if optimized and engine.is_file() else folder / name, settings)

        self._decoder = open_graph(DECODER) if decoder is None else open_session(decoder, settings)
        self._inputs = {value.name: value for value in self._decoder.get_inputs()}
        recorded = self._decoder.get_modelmeta().custom_metadata_map.get(CACHES)
        if recorded is None:
            raise InputError(
                f"{folder / DECODER}: records no caches of keys and values; {_REMEDY}",
                code=ErrorCode.FILE_MISMATCH,
                path=folder / DECODER,
            )
        returned = {value.name for value in self._decoder.get_outputs()}
        caches = {name: output for name, output in json.loads(recorded) if name in self._inputs}
        self._decoded = {name: output for name, output in caches.items() if output in returned}
        self._encoded = {name: output for name, output in caches.items() if output not in returned}
        has_encoder = (folder / ENCODER).is_file()
        if self._encoded and not has_encoder:
            raise InputError(
                f"{folder}: has no {ENCODER}, which computes what {DECODER} reads; copy it too",
                code=ErrorCode.FILE_MISSING,
                path=folder / ENCODER,
            )
        self._encoder = open_graph(ENCODER) if has_encoder else None
        opened = {DECODER: self._decoder} | ({} if self._encoder is None else {ENCODER: self._encoder})
        require_one_plan(
            folder, {name: session.get_modelmeta().custom_metadata_map.get(PLAN) for name, session in opened.items()}
        )
        logits = next(value for value in self._decoder.get_outputs() if value.name == "logits")
        self.vocabulary = int(logits.shape[-1])
        self.constants = dict[str, np.ndarray]()

    @property
    def precision(self) -> str:
        """The precision of the decoder; of its weights alone where these have fewer bits, e.g. `int4w`."""
        return self._decoder.get_modelmeta().custom_metadata_map.get(WEIGHTS, "fp32")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that a token adds to the caches of a text."""
        values = [self._inputs[name] for name in self._decoded]
        return sum(value.shape[1] * value.shape[3] * _dtype(value).itemsize for value in values)

    def start(self, batch: int) -> OrtCaches:
        """See `Sessions.start`."""
        return self._before(batch, {})

    def encode(self, inputs: Feeds) -> OrtCaches:
        """See `Sessions.encode`."""
        if self._encoder is None:  # no cross-attention has heads
            return self.start(len(next(iter(inputs.values()))))
        feeds = {value.name: inputs[value.name] for value in self._encoder.get_inputs() if value.name in inputs}
        outputs = self._run(self._encoder, feeds, {}, list(self._encoded.values()))
        batch = len(next(iter(feeds.values())))
        return self._before(batch, {name: outputs[output] for name, output in self._encoded.items()})

    def decode(
        self, input_ids: np.ndarray, mask: np.ndarray | None, position_ids: np.ndarray | None, caches: Caches
    ) -> tuple[np.ndarray, OrtCaches]:
        """See `Sessions.decode`."""
        assert isinstance(caches, OrtCaches)
        feeds = {"input_ids": input_ids, **dict.fromkeys(_MASKS, mask), "position_ids": position_ids}
        arrays = {name: array for name, array in feeds.items() if name in self._inputs and array is not None}
        arrays |= self.constants
        outputs = self._run(
            self._decoder, arrays, {**caches.decoded, **caches.encoded}, ["logits", *self._decoded.values()]
        )
        decoded = {name: outputs[output] for name, output in self._decoded.items()}
        length = caches.length + input_ids.shape[1]
        return outputs["logits"].numpy(), dataclasses.replace(caches, length=length, decoded=decoded)

    def _before(self, batch: int, encoded: Mapping[str, ort.OrtValue]) -> OrtCaches:
        """Caches without a position of the decoder; layers differ in their numbers of heads."""
        decoded = {}
        for name in self._decoded:
            value = self._inputs[name]
            _, heads, _, width = value.shape
            decoded[name] = _tensor(np.empty((batch, heads, 0, width), _dtype(value)), self._device)
        return OrtCaches(0, decoded, encoded, np.arange(batch))

    def _run(
        self, session: ort.InferenceSession, arrays: Feeds, caches: Mapping[str, ort.OrtValue], outputs: list[str]
    ) -> dict[str, ort.OrtValue]:
        """Outputs by name, of which only the logits leave the device."""
        binding = session.io_binding()
        replaced = [value for value in session.get_overridable_initializers() if value.name in arrays]
        for value in (*session.get_inputs(), *replaced):
            if value.name in caches:
                binding.bind_ortvalue_input(value.name, caches[value.name])
            elif value.name in arrays:
                array = np.ascontiguousarray(arrays[value.name], _dtype(value))
                binding.bind_ortvalue_input(value.name, _tensor(array, self._device))
            else:
                raise missing_input(value.name, [known.name for known in session.get_inputs()])
        for name in outputs:
            binding.bind_output(name, "cpu" if name == "logits" else self._device)
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # the exceptions of ONNX Runtime share no other base class
            raise InputError(
                f"ONNX Runtime cannot run the graph on these inputs ({error_line(error)})",
                code=ErrorCode.RUNTIME_FAILED,
            ) from error
        return dict(zip(outputs, binding.get_outputs(), strict=True))


def require_one_plan(folder: Path, digests: Mapping[str, str | None]) -> None:
    """Check that the graphs of a folder, and plan.json where there is one, are of one plan.

    Args:
        folder: the folder.
        digests: name of a graph -> the plan that it records (`plan_digest`); None: it records none.

    Raises:
        InputError: they are of several.
    """
    known = {name: digest for name, digest in digests.items() if digest is not None}
    if known and (path := folder / "plan.json").is_file():
        from graph_passes import Plan  # a served model has neither a plan nor this module

        known[path.name] = plan_digest({group.name: group.kept for group in Plan.load(path).groups})
    if len(set(known.values())) > 1:
        first, *_, last = known
        raise InputError(
            f"{folder / first}: keeps other units than {last} says; copy the whole folder of one run",
            code=ErrorCode.FILE_MISMATCH,
            path=folder / first,
            files=tuple(known),
        )


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
