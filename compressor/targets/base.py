"""The interface of a target: the object that describes it, the options of a build, and the engine that it returns."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from compressor.errors import ErrorCode, InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from compressor.results import EngineBuild, QuantizedProducts
    from compressor.targets.caches import GeneratingModel, Sessions
    from compressor.targets.tensor_specs import TensorSpec

Shape = tuple[int, int]
"""Batch size and length in tokens."""
Span = tuple[int, int, int]
"""Smallest, usual and largest value of a size."""
Widths = tuple[int, int]
"""Numbers of inputs and outputs of a matmul with constant weights. Matmuls of the same activations count as one with
the sum of their outputs: the projections of queries, keys and values, for example."""
Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
QUANTIZED: frozenset[Precision] = frozenset(("int8", "fp8"))
"""Precisions of engines that compute matmuls in 8 bits."""
WeightPrecision = Literal["int8w", "int4w"]
"""Precisions of the weights alone; activations stay in floats."""
WEIGHT_BITS: Mapping[WeightPrecision, int] = {"int8w": 8, "int4w": 4}
"""Bits of the weights."""
Provider = Literal["cpu", "cuda"]
Feeds = Mapping[str, np.ndarray]
"""One batch of inputs: graph input -> array."""
TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 1e-1, "fp8": 1e-1}
"""Largest relative error of an engine against its graph. bfloat16 has three mantissa bits less than fp16. An engine in
8 bits is compared with its quantized graph: a value close to the boundary of two numbers may be rounded to either, and
later layers amplify the difference."""


@dataclass(frozen=True)
class BuildOptions:
    """Sizes that an engine must take, and settings that only some targets use (`Target.options`).

    Attributes:
        batch: sizes of the first axis; a TensorRT engine is fastest at the usual one.
        seq: sizes of the other free axes, in tokens.
        memory: lengths of memories and caches, where the graph has any.
        workspace: bytes of device memory that the build may use; None: all free memory.
        timing_cache: file of TensorRT's kernel timings, read and updated; None: a file in the user's cache.
        hardware_compatible: build a TensorRT engine that runs on other GPUs too, from Ampere on.
        version_compatible: build a TensorRT engine that later versions run too.
        kernel: library of `compress kernel`, for block-sparse attention in ONNX Runtime on the CPU; None: plain ONNX.
        shapes: batch sizes and lengths that OpenVINO compiles the graph for, besides free axes.
        requires_shapes: whether a graph that cannot have these shapes is an error; False: it is compiled for free axes
            alone. So is a large graph, since each shape takes memory for another copy of the weights.
        free_axes: whether OpenVINO compiles the graph for free axes too when it builds the engine; False: when a batch
            has none of the `shapes`.
        split_norms: whether ONNX Runtime's fused normalizations are split; None: where that is faster.
        norm_seconds: time to spend on measuring which form is faster; 0: they stay fused.
        float_widths: widths of the matmuls that an int8 engine computes in floats, because they are slower in int8.
        float_precision: precision of the matmuls that an int8 engine of OpenVINO computes in floats.
    """

    batch: Span = (1, 8, 8)
    seq: Span = (1, 128, 128)
    memory: Span = (0, 0, 0)
    workspace: int | None = None
    timing_cache: Path | None = None
    hardware_compatible: bool = False
    version_compatible: bool = False
    kernel: Path | None = None
    shapes: tuple[Shape, ...] = ()
    requires_shapes: bool = True
    free_axes: bool = True
    split_norms: bool | None = None
    norm_seconds: float = 0.0
    float_widths: frozenset[Widths] = frozenset()
    float_precision: Literal["fp32", "bf16"] = "fp32"


def parse_shape(text: str) -> Shape:
    """Batch size and length of a shape such as `1x128`."""
    batch, seq = text.split("x")
    return int(batch), int(seq)


def span(usual: Iterable[int], also: Iterable[int] = ()) -> Span:
    """The span of sizes that an engine must take.

    Args:
        usual: sizes that the engine is optimized for; their median (the larger one of two) becomes the usual size.
        also: further sizes that the engine must take, which only widen the span.
    """
    sizes = sorted(usual)
    total = (*sizes, *also)
    return min(total), sizes[len(sizes) // 2], max(total)


@dataclass(kw_only=True, eq=False)
class Engine(ABC):
    """A graph, built and loaded.

    Attributes:
        path: the file that the runtime loads.
        specs: names, element types and shapes of the inputs that the engine takes, in the order of the graph.
        outputs: names of the graph's outputs, in order.
        precision: numeric precision of the engine.
        attentions: number of attentions in the graph; a layer whose heads are all removed has none.
        fused: number of attentions that the runtime executes as one operator each.
        kernels: number of executed operators by type.
        optimization: what was done to the graph for this runtime, in one line.
        session: runtime, version, device and options: everything needed to build an equal engine.
        host: runtime and device, for readers.
        quantized: the matmuls that are executed in 8 bits; None for an engine of another precision.
        products: number of matmuls with constant weights by the precision that they are executed in; empty where the
            runtime does not report it.
        reach: name of an input -> number of tokens that the block masks of the graph cover.
        is_reentrant: whether several threads may run it at once.
        built: facts about a build ahead of time; None where the runtime loads the graph itself.
        device_seconds: time of the last run by the device's clock, transfers excluded; None: unknown.
    """

    path: Path
    specs: tuple[TensorSpec, ...] = field(repr=False)
    outputs: tuple[str, ...]
    precision: Precision
    attentions: int
    fused: int
    kernels: Mapping[str, int]
    optimization: str
    session: Mapping[str, Any]
    host: str
    quantized: QuantizedProducts | None = None
    products: Mapping[str, int] = field(default_factory=dict)
    reach: Mapping[str, int] = field(default_factory=dict)
    is_reentrant: bool = False
    built: EngineBuild | None = None
    device_seconds: float | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs, in order."""
        return tuple(spec.name for spec in self.specs)

    @abstractmethod
    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; feeds without an input of the graph are ignored.

        Raises:
            InputError: an input is missing or longer than the block masks, or the graph cannot run on these inputs.
        """

    def call(self, feeds: Feeds) -> Callable[[], object]:
        """A function that runs the engine on a batch; what its attribute `prepare` does, if any, is not timed."""
        return partial(self.run, feeds)

    def generator(self, model: Any) -> Any:
        """The model of transformers whose `generate` runs the engine with its key/value caches; None: it has none.

        Args:
            model: a model of transformers, of the class and configuration of the engine's.
        """
        return None

    @abstractmethod
    def memory(self, feeds: Feeds) -> int | None:
        """Peak memory in bytes of loading the engine and running `feeds`; None: unknown.

        It is measured on a device with separate memory, else in a new process.
        """


class Target(ABC):
    """A runtime to build for. Its package defines one object of a subclass, `TARGET`, in `target.py`.

    Calling the object builds an engine, like `build`. The methods import the modules that need the runtime, so that the
    object exists on machines without it.

    Attributes:
        name: key in `TARGETS`, and value of `--target`.
        title: the runtime's name for readers, e.g. `ONNX Runtime`.
        engines: the module whose `build_engine` and `load_engine` `build` and `load` call.
        caches: the module that builds and opens engines of models that generate (`build_sessions`, `open_sessions`),
            also with rounded weights (`round_weights`, `check_rounded`); None: the target has no engines with key/value
            caches.
        session_names: patterns of the file names of engines of models that generate.
        library_names: patterns of the names of the files that `write_library_files` writes.
        library: the runtime's own library that generates with such engines; None: there is none.
        packages: Python packages whose versions determine the speed of engines, besides that of the session.
        engine_file: name of the file in the folder of a run that `build` writes and the runtime loads.
        metadata_file: name of a second file in the folder of the engine that loading it needs; None: there is none.
        suffixes: suffixes of the engine files that `load` takes.
        providers: devices that its engines run on.
        options: names of the fields of `BuildOptions` that it uses, besides the sizes.
        quantizes: whether `build` makes an int8 engine from a float graph; every target that has int8 makes one from a
            graph with `QuantizeLinear` and `DequantizeLinear`.
        symmetric: whether quantized graphs need zero points of 0, and quantizers where TensorRT expects them.
        tried_precisions: the precisions that are tried where the precision is chosen by measuring.
        tolerance: largest relative error of an engine of a precision against its graph.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    engines: ClassVar[str]
    caches: ClassVar[str | None] = None
    session_names: ClassVar[tuple[str, ...]] = ()
    library_names: ClassVar[tuple[str, ...]] = ()
    library: ClassVar[str | None] = None
    packages: ClassVar[tuple[str, ...]] = ()
    engine_file: ClassVar[str]
    metadata_file: ClassVar[str | None] = None
    suffixes: ClassVar[tuple[str, ...]]
    providers: ClassVar[tuple[Provider, ...]]
    options: ClassVar[frozenset[str]] = frozenset()
    quantizes: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False
    tried_precisions: ClassVar[tuple[Precision, ...]] = ("fp32", "int8")
    tolerance: ClassVar[Mapping[Precision, float]] = TOLERANCE

    @property
    def needs_device(self) -> bool:
        """Whether engines run on a GPU only; without one a run falls back to ONNX Runtime on the CPU."""
        return "cpu" not in self.providers

    def reference_precision(self, precision: Precision) -> Precision:
        """Precision of the dense engine that an engine of a precision is compared with.

        Half precision is compared with itself, since the users of GPUs start from there.
        """
        return "fp32" if precision in QUANTIZED else precision

    @property
    def drops_positions(self) -> bool:
        """Whether this machine correctly computes graphs whose last layers leave out the tokens that nothing reads."""
        return True

    @property
    def float_precision(self) -> Literal["fp32", "bf16"]:
        """Precision of the matmuls that int8 engines of mixed precision compute in floats on this machine."""
        return "fp32"

    def quantized_graph(self, precision: Precision) -> str | None:
        """File name of the quantized graph that a run writes for engines of a precision; None: they need none."""
        from compressor.workdir import FP8_GRAPH, QUANTIZED_GRAPH, SYMMETRIC_GRAPH

        if precision not in QUANTIZED:
            return None
        if precision == "fp8":
            return FP8_GRAPH
        return SYMMETRIC_GRAPH if self.symmetric else QUANTIZED_GRAPH

    def sources(self, precision: Precision) -> tuple[str | None, ...]:
        """File names of the graphs of a run that engines of a precision can be built from; None: the float graph.

        The graph of the fastest engine comes first: a target that quantizes the float graph itself is faster with that.
        """
        quantized = self.quantized_graph(precision)
        if quantized is None:
            return (None,)
        return (None, quantized) if self.quantizes and precision == "int8" else (quantized,)

    def engine_files(self, folder: Path) -> list[Path]:
        """The files of an engine of this target in the folder of a run: the engine, its metadata and its weights."""
        names = (self.engine_file, self.metadata_file)
        return sorted(
            path for path in folder.iterdir() if path.name in names or path.name.startswith(f"{self.engine_file}.")
        )

    def missing(self) -> str | None:
        """What this machine lacks to build and run engines, in a few words; None: nothing."""
        return None

    def check_request(
        self, *, precision: Precision = "fp32", provider: Provider | None = None, kernel: Path | None = None
    ) -> None:
        """Raise where requested options contradict the target, on any machine.

        Raises:
            UsageError: the precision is unknown, the target runs on no such provider, or cannot use a kernel.
        """
        if precision not in TOLERANCE:
            text = f"precision {precision!r}: unknown; use {', '.join(TOLERANCE)}"
            raise UsageError(text, code=ErrorCode.UNKNOWN_NAME, field="precision", value=precision)
        if provider is not None and provider not in self.providers:
            raise UsageError(
                f"--provider {provider}: {self.title} runs on {' or '.join(self.providers)} only; omit --provider, or"
                " use --target ort",
                code=ErrorCode.CONTRADICTION,
                fields=("provider", "target"),
                value=provider,
            )
        if kernel is not None and "kernel" not in self.options:
            raise UsageError(
                f"--kernel {kernel}: the kernel is for ONNX Runtime on the CPU, not for {self.title}; omit --kernel, "
                f"or use --target ort",
                code=ErrorCode.CONTRADICTION,
                fields=("kernel", "target"),
                value=kernel,
            )

    def check(
        self, *, precision: Precision = "fp32", provider: Provider | None = None, kernel: Path | None = None
    ) -> None:
        """Raise where engines cannot be built on this machine, before any work is done for them.

        Raises:
            UsageError: options contradict the target, or the runtime lacks the precision.
            TargetMissingError: the runtime or its device is missing.
        """
        self.check_request(precision=precision, provider=provider, kernel=kernel)
        self.check_machine(precision, provider, kernel)

    @abstractmethod
    def check_machine(self, precision: Precision, provider: Provider | None, kernel: Path | None) -> None:
        """Raise where the runtime, its device or the precision is missing on this machine; `check` calls it.

        Raises:
            UsageError: the runtime lacks the precision.
            TargetMissingError: the runtime or its device is missing.
        """

    def build(
        self,
        onnx: Path,
        out: Path,
        *,
        precision: Precision = "fp32",
        provider: Provider | None = None,
        threads: int | None = None,
        options: BuildOptions | None = None,
    ) -> Engine:
        """Build an engine and load it.

        Args:
            onnx: the graph; its file stays unchanged.
            out: the file to write, which the runtime loads.
            precision: numeric precision of the engine.
            provider: device to run on; None: a GPU where there is one.
            threads: threads per call; None: one per core.
            options: sizes and settings of the build; None: the defaults.

        Raises:
            TargetMissingError: the runtime or its device is missing.
            InputError: the runtime cannot read the graph or cannot build it.
        """
        options = options or BuildOptions()
        self.check(precision=precision, provider=provider, kernel=options.kernel)
        return import_module(self.engines).build_engine(
            onnx, out, precision=precision, provider=provider, threads=threads, options=options
        )

    __call__ = build

    def load(
        self,
        path: Path,
        *,
        provider: Provider | None = None,
        threads: int | None = None,
        kernel: Path | None = None,
        cached: bool = True,
    ) -> Engine:
        """Load an engine that was built earlier.

        Args:
            path: the file that `build` wrote.
            provider: device to run on; None: a GPU where there is one.
            threads: threads per call; None: one per core.
            kernel: library of `compress kernel`; None: plain ONNX.
            cached: whether a runtime that compiles keeps what it compiled for later loads, in the user's cache folder.

        Raises:
            TargetMissingError: the runtime or its device is missing.
            InputError: the file is missing or damaged, or was built for another device or version.
        """
        self.check(provider=provider, kernel=kernel)
        return import_module(self.engines).load_engine(
            Path(path), provider=provider, threads=threads, kernel=kernel, cached=cached
        )

    def prepare_caches(self, graph: ir.Model) -> None:
        """Rewrite a graph with key/value caches, in place, to the form in which the runtime fuses attention."""
        return

    def build_sessions(
        self, folder: Path, files: Iterable[str], sizes: Iterable[tuple[int, int]], threads: int | None
    ) -> None:
        """Build the engines of a model that generates beside its graphs; only for a target with `caches`.

        Args:
            files: file names of the graphs, the decoder last; missing files are skipped.
            sizes: batch sizes and lengths of texts, at which forms of operators are compared.

        Raises:
            InputError: the runtime cannot read or run a graph.
        """
        present = [name for name in files if (folder / name).is_file()]
        self._sessions.build_sessions(folder, present, sizes, threads)

    def round_weights(self, folder: Path, rounds: Callable[[ir.Model], ir.Model], out: Path) -> Path:
        """Build the engine of a decoder once more, with rounded weights; only for a target with `caches`.

        Args:
            folder: the folder of the graphs, and of the engines that `build_sessions` has built.
            rounds: replaces matmuls of a graph by `MatMulNBits` (`graph_passes.passes.QuantizeWeights`).
            out: another existing folder for the files of the engine; files of the same names are replaced.

        Returns:
            The file of the engine.

        Raises:
            InputError: `rounds` refuses the graph, or the runtime does not multiply by the weights as they are stored.
        """
        return self._sessions.round_weights(folder, rounds, out)

    def check_rounded(self, graph: Path) -> None:
        """Check that the runtime multiplies by rounded weights as they are stored; only for a target with `caches`.

        Raises:
            InputError: the runtime does not, in this installation or on this processor.
        """
        self._sessions.check_rounded(graph)

    def open_sessions(
        self,
        folder: Path,
        *,
        provider: Provider | None = None,
        threads: int | None = None,
        decoder: Path | None = None,
    ) -> Sessions:
        """Load the engines of a model that generates; only for a target with `caches`.

        Args:
            folder: their folder.
            provider: device to run on; None: a GPU where there is one.
            threads: threads per call; None: one per core.
            decoder: the file of the decoder; None: the one of the folder.

        Raises:
            UsageError: the target runs on no such provider.
            TargetMissingError: the runtime or its device is missing.
            InputError: an engine is missing, or cannot be loaded.
        """
        self.check(provider=provider)
        return self._sessions.open_sessions(folder, provider=provider, threads=threads, decoder=decoder)

    def write_library_files(self, folder: Path, model: GeneratingModel) -> str | None:
        """Write the files that the runtime's library that generates (`library`) reads beside the engines of a folder.

        Args:
            folder: the folder, whose engines `build_sessions` has built.
            model: the model of the engines.

        Returns:
            What the library cannot do with the folder, and why; None: the library loads the folder.
        """
        return None

    def session_files(self, folder: Path) -> list[Path]:
        """The files of the engines of a model that generates in a folder; empty without `caches`."""
        return sorted(path for pattern in self.session_names for path in folder.glob(pattern))

    def library_files(self, folder: Path) -> list[Path]:
        """The files in a folder that `write_library_files` writes, except links."""
        return sorted(path for pattern in self.library_names for path in folder.glob(pattern))

    @property
    def _sessions(self) -> ModuleType:
        assert self.caches is not None
        return import_module(self.caches)

    def run_fixed(self, onnx: Path, feeds: Feeds, *, precision: Precision = "fp32") -> dict[str, np.ndarray]:
        """Outputs of a graph compiled for the shapes of a single batch.

        Args:
            onnx: the graph, which is rewritten for the runtime only where the runtime cannot run it as it is.

        Raises:
            TargetMissingError: the runtime or its device is missing.
            InputError: the runtime cannot read the graph, or cannot run it at these shapes.
        """
        shapes = [array.shape for array in feeds.values()]
        length = max((shape[1] for shape in shapes if len(shape) == 2), default=1)
        batch, seq = ((size, size, size) for size in (shapes[0][0], length))
        with tempfile.TemporaryDirectory() as folder:
            options = BuildOptions(batch=batch, seq=seq)
            return self.build(onnx, Path(folder) / self.engine_file, precision=precision, options=options).run(feeds)


def missing_input(name: str, inputs: Iterable[str]) -> InputError:
    """The error of a batch without an input of the graph."""
    text = f"{name}: this input of the graph is missing; pass {', '.join(inputs)}"
    return InputError(text, code=ErrorCode.TENSOR_MISMATCH, tensor=name)


def check_reach(reach: Mapping[str, int], feeds: Feeds) -> None:
    """Raise InputError where an input is longer than the block masks of a graph.

    A runtime on a GPU would read beyond the end of a mask without an error.

    Args:
        reach: input -> number of positions that the masks cover.
    """
    for name, maximum in reach.items():
        if name in feeds and feeds[name].shape[1] > maximum:
            text = (
                f"{name}: {feeds[name].shape[1]} tokens, and the block masks cover {maximum}; pass shorter texts, or"
                " learn masks on longer texts (--max-length)"
            )
            raise InputError(
                text, code=ErrorCode.OUT_OF_RANGE, tensor=name, value=feeds[name].shape[1], maximum=maximum
            )
