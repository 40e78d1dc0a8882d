"""Engines of ONNX Runtime: fuse a graph, load it, and count the operators that the runtime executes.

A fused graph, or one with split normalizations, is used only if it computes the same function.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from compressor.environment import int8_instructions
from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.results import QuantizedProducts
from compressor.silence_libraries import quiet_tools
from compressor.targets.base import TOLERANCE, BuildOptions, Engine, Feeds, Precision, Provider, check_reach
from compressor.targets.cuda import driver
from compressor.targets.graph_facts import (
    float_matmuls,
    fusible_attentions,
    names_of,
    quantized_matmuls,
    read_float_widths,
    stored_precision,
)
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.dynamic import INT8_KERNELS, quantize_dynamically
from compressor.targets.onnxruntime.ort_session import error_line, open_session, run_bound, run_session
from compressor.targets.peak_memory import peak_growth
from compressor.targets.relative_error import ReferenceOutputs, relative_error
from compressor.targets.tensor_specs import FREE, TensorSpec
from compressor.targets.trial_inputs import decoding_feeds, draws_ids, fixed_batch, trial_feeds
from graph_passes import load, save
from graph_passes.block_sparse.function import NAME, is_block_sparse
from graph_passes.block_sparse.masks import REACH
from graph_passes.errors import listed
from graph_passes.flow.caches import IN_PLACE, cache_names
from graph_passes.passes import FuseForOrt, ReducePrecision, SplitSkipNorms
from graph_passes.passes.name_decoding_axes import MASK

ATTENTIONS = ("Attention", "GroupQueryAttention", "MultiHeadAttention", "QAttention")
"""Operator types of ONNX Runtime that compute one whole attention each."""
_REPORTED = (
    *ATTENTIONS,
    *sorted(INT8_KERNELS - {"QAttention"}),
    *("Softmax", "LayerNormalization", "SimplifiedLayerNormalization", "ReduceMean"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "BiasGelu", "FastGelu", "Gelu", "Erf"),
)
"""Operator types that `optimization` counts."""
Rewrite = Callable[[ir.Model], ir.Model]
_TRIALS = ((1, 6, False), (2, 9, True), (3, 5, True))
"""Batch size, length and padding of the inputs that a fused graph is compared on."""
_log = logging.getLogger(__name__)
ROUNDS = 6
"""Rounds in which two forms of a graph are timed."""
PAUSE_SECONDS = 0.05
"""Time after which the threads of a session have stopped spinning."""
_AS_STORED = "compressor.as_stored"
"""Entry of the metadata of an engine whose graph was already in half precision; every device runs it, some with
casts."""
GAIN = 1.01
"""Least speed-up for which fused normalizations are split."""


@dataclass(kw_only=True, eq=False)
class OrtEngine(Engine):
    """A graph loaded into ONNX Runtime."""

    _session: ort.InferenceSession = field(repr=False)

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; see `Engine.run`."""
        check_reach(self.reach, feeds)
        return ort_session.run_session(self._session, feeds)

    def memory(self, feeds: Feeds) -> int | None:
        """Bytes that loading and running the graph takes at the peak; see `Engine.memory`."""
        return peak_growth(ort_session.__name__, self.path, self.session, feeds, on_gpu=_is_on_gpu(self.session))


def rewrite_for_ort(model: ir.Model) -> ir.Model:
    """Fuse a model by `FuseForOrt`; the model is changed."""
    return FuseForOrt()(model).model


def build_engine(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
    options: BuildOptions | None = None,
) -> OrtEngine:
    """Fuse a graph for ONNX Runtime, and load it; see `Target.build`.

    Raises:
        TargetMissingError: the device is missing, or does not compute in the precision.
        UsageError: the kernel is missing, or is for another device.
        InputError: ONNX Runtime cannot load or run the graph.
    """
    options = options or BuildOptions()
    provider = ort_session.choose_provider(provider, precision, options.kernel)
    settings = ort_session.session_settings(provider, threads, options.kernel)
    if precision == "int8" and (matmuls := quantized_matmuls(load(onnx))):
        # ONNX Runtime fuses quantized matmuls itself; rules for float operators would separate them from their scales.
        save(load(onnx), out)
        return _open(out, onnx, settings, precision, ["quantized graph"], len(matmuls))
    fusion = fuse(onnx, out, settings)
    changes = [str(fusion)]
    if fusion.fused and cache_names(model := load(onnx)) and options.norm_seconds:
        step = decoding_feeds(model, fixed_batch(model) or options.batch[1], options.seq[1])
        if (mask := step.get(MASK)) is not None:
            mask[-1, 0] = 0  # padding on the left, which the forms of a decoder hide in different ways
        changes.append(choose_decoder(out, onnx, settings, step, options.norm_seconds))
    if precision == "fp32" and (stored := stored_precision(model := load(out))) != precision:
        model.metadata_props[_AS_STORED] = stored
        save(model, out)
        changes.append(f"stored and computed in {stored}, as the graph is")
    if precision == "fp16":
        save(ReducePrecision()(load(out)).model, out)
        changes.append("converted to half precision, inputs and outputs unchanged")
    requested = None
    if precision == "int8":
        reduce_range = not int8_instructions()
        requested = len(quantize_dynamically(out, out, reduce_range=reduce_range, float_widths=options.float_widths))
        changes.append("quantized dynamically")
    if options.split_norms:
        save(SplitSkipNorms()(load(out)).model, out)
        changes.append("norms split")
    elif options.split_norms is None and options.norm_seconds:
        model = load(onnx)
        feeds = trial_feeds(model, fixed_batch(model) or options.batch[1], options.seq[1])
        choice = choose_norms(out, settings, feeds, TOLERANCE[precision], options.norm_seconds)
        changes += [choice] if choice is not None else []
    return _open(out, onnx, settings, precision, changes, requested)


def load_engine(
    path: Path,
    *,
    provider: Provider | None = None,
    threads: int | None = None,
    kernel: Path | None = None,
    cached: bool = True,
) -> OrtEngine:
    """Load a graph that `build_engine` wrote; see `Target.load`.

    Raises:
        TargetMissingError: the device is missing, or does not compute in the graph's precision.
        InputError: the file is missing, or ONNX Runtime cannot load it.
    """
    if not path.is_file():
        raise InputError.of_file(path, "no such engine; build it with compress build", ErrorCode.FILE_MISSING)
    precision = _precision(load(path))
    provider = ort_session.choose_provider(provider, precision, kernel)
    return _open(path, path, ort_session.session_settings(provider, threads, kernel), precision, ["loaded as built"])


def _open(
    path: Path,
    source: Path,
    settings: dict[str, Any],
    precision: Precision,
    changes: list[str],
    requested: int | None = None,
) -> OrtEngine:
    """Load the engine in `path`, which was built by some changes from the graph `source`.

    Attentions are counted in `source`. The engine is expected to execute `requested` matmuls in int8; None: as many as
    the file has in int8.
    """
    kernels = ort_session.executed_operators(path, settings, next(fusion_trials(source)))
    counts = [f"{kernels[name]} {name}" for name in _REPORTED if name in kernels]
    fused_attentions = sum(kernels.get(name, 0) for name in ATTENTIONS)
    model = load(source)
    fusible = fusible_attentions(model)
    if block_sparse := sum(is_block_sparse(node) for node in model.graph):
        by = f" ({kernels.get(NAME, 0)} by the kernel of {settings['kernel']})" if "kernel" in settings else ""
        counts.insert(0, f"{block_sparse} block-sparse attentions{by}")
    if counts:
        changes = [*changes, f"runs {', '.join(counts)}"]
    session = ort_session.open_session(path, settings)
    quantized = _quantized(path, kernels, requested) if precision == "int8" else None
    device = str(driver().device) if _is_on_gpu(settings) else settings["provider"]
    host = f"{settings['runtime']} on {device}, {settings['intra_op_threads']} threads"
    return OrtEngine(
        path=path,
        specs=tuple(map(_spec, session.get_inputs())),
        outputs=tuple(value.name for value in session.get_outputs()),
        precision=precision,
        # A graph that another program fused may have attentions that only the runtime recognizes.
        attentions=max(len(fusible), fused_attentions),
        fused=fused_attentions,
        kernels=kernels,
        optimization="; ".join(changes),
        session=settings,
        host=f"{host}, compiled kernel" if "kernel" in settings else host,
        quantized=quantized,
        products={} if quantized is None else quantized.by_precision,
        reach=json.loads(model.metadata_props.get(REACH, "{}")),
        is_reentrant=True,
        _session=session,
    )


def _is_on_gpu(settings: Mapping[str, Any]) -> bool:
    return bool(settings["provider"] == ort_session.PROVIDERS["cuda"])


def _precision(model: ir.Model) -> Precision:
    if any(node.op_type in (*INT8_KERNELS, "DequantizeLinear") for node in model.graph):
        return "int8"
    if _AS_STORED in model.metadata_props:
        return "fp32"
    weights = model.graph.initializers.values()
    return "fp16" if any(value.dtype == ir.DataType.FLOAT16 for value in weights) else "fp32"


def _quantized(path: Path, kernels: Mapping[str, int], requested: int | None) -> QuantizedProducts:
    """The matmuls of an engine in int8, by its executed operators; see `_open`."""
    model = load(path)
    if requested is None:
        requested = sum(node.op_type in INT8_KERNELS for node in model.graph) + len(quantized_matmuls(model))
    return QuantizedProducts(
        requested=requested,
        executed=sum(count for kernel, count in kernels.items() if kernel in INT8_KERNELS),
        float_in_graph=names_of(float_matmuls(model)),
        float_widths=read_float_widths(model),
    )


def _spec(tensor: ort.NodeArg) -> TensorSpec:
    """An input of a session, whose type reads like `tensor(float16)`."""
    dims = tuple(size if isinstance(size, int) else FREE for size in tensor.shape)
    element_type = tensor.type.removeprefix("tensor(").removesuffix(")")
    return TensorSpec(tensor.name, ir.DataType[element_type.upper()], dims)


@dataclass(frozen=True)
class Fusion:
    """The outcome of `fuse`.

    Attributes:
        fused: whether the graph was written fused; otherwise it was written unchanged.
        error: largest relative error of the fused graph; None where it could not be built or run.
        reason: why the graph was not fused; empty where it was.
    """

    fused: bool
    error: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.fused:
            return f"fused by onnxscript's rules, equal to the original graph within {self.error:.1e}"
        return f"not fused beyond ONNX Runtime's own optimizations: {self.reason}"


def fuse(source: Path, out: Path, settings: Mapping[str, Any], rewrite: Rewrite = rewrite_for_ort) -> Fusion:
    """Fuse a graph and write it; it is written unchanged unless the fused graph computes the same function.

    Args:
        rewrite: fuses a model; it may raise any exception.

    Raises:
        CompressorError: the original graph cannot be loaded or run.
        OSError: `out` cannot be written.
    """
    reference = _reference_outputs(source, settings)
    error = None
    try:
        with quiet_tools():
            model = rewrite(load(source))
        save(model, out)
        error = _largest_error(out, settings, reference)
        if error <= TOLERANCE[stored_precision(load(source))]:
            _log.debug("%s: fused within %.1e", source, error)
            return Fusion(fused=True, error=error)
        reason = f"the outputs of the fused graph differ by {error:.1e}"
    except CompressorError as failure:
        reason = error_line(failure.__cause__ or failure)
    except OSError:
        raise
    except Exception as failure:  # rewriters raise any exception on graphs that they do not expect
        reason = f"{type(failure).__name__}: {error_line(failure)}"
    save(load(source), out)
    _log.debug("%s: not fused: %s", source, reason)
    return Fusion(fused=False, error=error, reason=reason)


def fusion_trials(source: Path) -> Iterator[dict[str, np.ndarray]]:
    """Inputs of several sizes, with and without padding, but of the batch size that the graph fixes, if it does."""
    model = load(source)
    fixed = fixed_batch(model)
    for seed, (batch, seq, padded) in enumerate(_TRIALS):
        yield trial_feeds(model, fixed or batch, seq, seed=seed, padded=padded)


def _reference_outputs(source: Path, settings: Mapping[str, Any]) -> ReferenceOutputs:
    """The outputs of a graph without optimizations, for the trials that it can run: some may exceed its positions."""
    session = open_session(source, {**settings, "graph_optimization": "none"})
    batches, outputs, failure = list[Feeds](), list[dict[str, np.ndarray]](), None
    for feeds in fusion_trials(source):
        try:
            outputs.append(run_session(session, feeds))
            batches.append(feeds)
        except InputError as error:
            failure = error
    if failure is not None and not batches:
        if not draws_ids(load(source)):
            raise failure
        text = (
            f"{source}: the graph does not run on random inputs ({failure}), and stores no example rows; export it"
            " again with compress, or store rows in it (compressor.targets.example_rows.record_example_rows)"
        )
        raise InputError(text, code=ErrorCode.RUNTIME_FAILED, path=source)
    return ReferenceOutputs(outputs, batches)


def _largest_error(path: Path, settings: Mapping[str, Any], reference: ReferenceOutputs) -> float:
    session = open_session(path, settings)
    return max(
        reference.error(number, name, outputs[name])
        for number, feeds in enumerate(reference.batches)
        for outputs in [run_session(session, feeds)]
        for name in reference.outputs[number]
    )


def choose_norms(path: Path, settings: Mapping[str, Any], feeds: Feeds, tolerance: float, seconds: float) -> str | None:
    """Split the fused normalizations of a graph where that is faster.

    Args:
        path: the graph, fused for ONNX Runtime; replaced where split normalizations are faster and compute the same.
        feeds: one batch of inputs of the size to be fast at.
        tolerance: largest relative error of the split normalizations.
        seconds: approximate time to spend.

    Returns:
        What was chosen, in a few words; None where the graph has no fused normalization of a residual sum, or cannot
        run at this size.
    """
    model = load(path)
    if not SplitSkipNorms()(model).modified:
        return None
    with tempfile.TemporaryDirectory() as folder:
        split = Path(folder) / path.name
        save(model, split)
        sessions = [open_session(file, settings) for file in (path, split)]
        try:
            expected, outputs = (run_session(session, feeds) for session in sessions)
        except InputError:  # raised again when the engine runs at this size
            return None
        error = max(relative_error(expected[name], outputs[name], feeds) for name in expected)
        fused, separate = _shortest_times([partial(run_session, session, feeds) for session in sessions], seconds)
        gain = fused / separate
        del sessions
        _log.debug("%s: split norms are %.3f times as fast, relative error %.1e", path, gain, error)
        if error > tolerance:
            return f"fused norms kept, since split ones differ by {error:.1e}"
        if gain < GAIN:
            return f"fused norms kept, split ones are {gain:.2f} times as fast"
        save(load(split), path)
    return f"norms split, {gain:.2f} times as fast as fused ones"


def choose_decoder(path: Path, source: Path, settings: Mapping[str, Any], feeds: Feeds, seconds: float) -> str:
    """Keep the fastest form of a decoder: as it is, fused, or fused so that it writes into the memory of its caches.

    Args:
        path: the fused graph; replaced where another form is faster.
        feeds: inputs of one step, see `decoding_feeds`.
        seconds: approximate time to spend.

    Returns:
        What was chosen, in a few words.
    """
    model = load(source)
    with tempfile.TemporaryDirectory() as folder:
        files = {"fused in place": Path(folder) / path.name, "fused": path, "not fused": source}
        fusion = fuse(source, files["fused in place"], settings, lambda model: FuseForOrt(in_place=True)(model).model)
        if not fusion.fused or IN_PLACE not in load(files["fused in place"]).metadata_props:
            del files["fused in place"]
        try:
            steps = {form: _DecodingStep(file, settings, feeds, cache_names(model)) for form, file in files.items()}
            expected, allowed = steps["not fused"].outputs, TOLERANCE[stored_precision(model)]
            right = {
                form: step
                for form, step in steps.items()
                if all(relative_error(expected[name], step.outputs[name], feeds) <= allowed for name in expected)
            }
            times = dict(zip(right, _shortest_times(list(right.values()), seconds), strict=True))
        except InputError as error:  # raised again when the engine runs at this size
            return f"the fused decoder kept without timing: {error_line(error)}"
        chosen = min(times, key=times.__getitem__)
        if files[chosen] != path:
            save(load(files[chosen]), path)
    if len(times) == 1:
        return f"the decoder {chosen}, since its fused forms compute something else"
    gains = [f"{time / times[chosen]:.2f} times as fast as {form}" for form, time in times.items() if form != chosen]
    return f"the decoder {chosen}, in a step {listed(gains)}"


class _DecodingStep:
    """A call of a decoder on fixed inputs; caches stay in the memory of the runtime.

    Args:
        path: the decoder. If it writes into the memory of its caches, they have room for the new positions.
        feeds: inputs of the call; caches have the earlier positions alone.
        caches: name of each cache -> the output that holds its content.

    Attributes:
        outputs: the other outputs.

    Raises:
        InputError: ONNX Runtime cannot load the decoder, or run it on these inputs.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], feeds: Feeds, caches: Mapping[str, str]) -> None:
        self._session = open_session(path, settings)
        self._binding = self._session.io_binding()
        in_place = IN_PLACE in self._session.get_modelmeta().custom_metadata_map
        self._arrays: list[np.ndarray] = []  # the binding owns no memory
        for value in self._session.get_inputs():
            array = feeds[value.name]
            shared = in_place and value.name in caches
            self._arrays.append(np.pad(array, [(0, 0), (0, 0), (0, 1), (0, 0)]) if shared else array)
            tensor = ort.OrtValue.ortvalue_from_numpy(self._arrays[-1])
            self._binding.bind_ortvalue_input(value.name, tensor)
            if shared:
                self._binding.bind_ortvalue_output(caches[value.name], tensor)
        names = [value.name for value in self._session.get_outputs()]
        bound = [name for name in caches.values() if in_place]
        for name in (name for name in names if name not in bound):
            self._binding.bind_output(name)
            bound.append(name)
        self()
        tensors = dict(zip(bound, self._binding.get_outputs(), strict=True))
        self.outputs = {name: tensor.numpy() for name, tensor in tensors.items() if name not in caches.values()}

    def __call__(self) -> None:
        run_bound(self._session, self._binding)


def _shortest_times(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Shortest time of each of some calls, in rounds that take turns.

    What else runs on the machine makes single calls longer, never shorter, and slow calls leave time for few of them.
    """
    times = [list[float]() for _ in calls]
    share = seconds / (len(calls) * ROUNDS)
    for _ in range(ROUNDS):
        for call, samples in zip(calls, times, strict=True):
            time.sleep(min(PAUSE_SECONDS, share / 2))
            call()
            end = time.perf_counter() + share / 2
            while not samples or time.perf_counter() < end:
                start = time.perf_counter()
                call()
                samples.append(time.perf_counter() - start)
    return [min(samples) for samples in times]
