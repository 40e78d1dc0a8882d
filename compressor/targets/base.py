"""The interface of a target: the object that describes it, and the engine that it returns."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from compressor.errors import ErrorCode, UsageError
from compressor.targets.options import BuildOptions

if TYPE_CHECKING:
    from compressor.results import EngineBuild, QuantizedProducts
    from compressor.targets.tensor_specs import TensorSpec

Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
QUANTIZED: frozenset[Precision] = frozenset(("int8", "fp8"))
"""Precisions of engines that compute products in 8 bits."""
Provider = Literal["cpu", "cuda"]
Feeds = Mapping[str, np.ndarray]
"""One batch of inputs: graph input -> array."""

TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 1e-1, "fp8": 1e-1}
"""Largest relative error of an engine against its graph. bfloat16 has three mantissa bits less than fp16. An engine in
8 bits is compared with its quantized graph: a value close to the boundary of two numbers may be rounded to either, and
later layers amplify the difference."""


class Engine(Protocol):
    """A graph, built and loaded.

    Attributes:
        path: the file that the runtime loads.
        inputs: names of the graph's inputs, in order.
        specs: names, element types and shapes of the inputs that the engine takes.
        outputs: names of the graph's outputs, in order.
        precision: numeric precision of the engine.
        attentions: number of attentions in the graph; a layer without heads has none.
        fused: number of attentions that the runtime executes as one operator each.
        kernels: number of executed operators by type.
        optimization: what was done to the graph for this runtime, in one line.
        session: runtime, version, device and options: everything needed to build an equal engine.
        host: runtime and device, for readers.
        is_reentrant: whether several threads may run it at once.
        quantized: which matrix products are executed in int8; None for an engine of another precision.
        products: number of matrix products with constant weights that are executed in each precision; empty where the
            runtime does not report it.
        built: facts about a build ahead of time; None where the runtime loads the graph itself.
        device_seconds: time of the last run by the device's clock, transfers excluded; None: unknown.
    """

    @property
    def path(self) -> Path: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def specs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def attentions(self) -> int: ...
    @property
    def fused(self) -> int: ...
    @property
    def kernels(self) -> Mapping[str, int]: ...
    @property
    def optimization(self) -> str: ...
    @property
    def session(self) -> Mapping[str, Any]: ...
    @property
    def host(self) -> str: ...
    @property
    def is_reentrant(self) -> bool: ...
    @property
    def quantized(self) -> QuantizedProducts | None: ...
    @property
    def products(self) -> Mapping[str, int]: ...
    @property
    def built(self) -> EngineBuild | None: ...
    @property
    def device_seconds(self) -> float | None: ...

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name; feeds without an input of the graph are ignored."""
        ...

    def memory(self, feeds: Feeds) -> int | None:
        """Peak memory in bytes of loading the engine and running `feeds`; None: unknown.

        It is measured on the device where that has memory of its own, else in a fresh process.
        """
        ...


class Target(ABC):
    """A runtime to build for. Its package defines one object of a subclass, `TARGET`, in `target.py`.

    Calling the object builds an engine, like `build`. The methods import the modules that need the runtime, so that the
    object exists on machines without it.

    Attributes:
        name: key in `TARGETS`, and value of `--target`.
        title: the runtime's name for readers, e.g. `ONNX Runtime`.
        engine_file: name of the file in the folder of a run that `build` writes and the runtime loads.
        metadata_file: name of the file beside the engine without which it cannot be loaded; None: there is none.
        suffixes: suffixes of the engine files that `load` takes.
        providers: devices that its engines run on.
        options: names of the fields of `BuildOptions` that it uses, besides the sizes.
        quantizes: whether `build` makes an int8 engine from a float graph; every target that has int8 makes one from a
            graph with `QuantizeLinear` and `DequantizeLinear`.
        symmetric: whether quantized graphs need zero points of zero, and quantizers where TensorRT wants them.
        tried_precisions: the precisions that are tried where the precision is chosen by measuring.
        tolerance: largest relative error of an engine of a precision against its graph.
    """

    name: ClassVar[str]
    title: ClassVar[str]
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
        """Whether graphs whose last layers lack the positions that nothing reads are computed right on this machine."""
        return True

    @property
    def float_precision(self) -> Literal["fp32", "bf16"]:
        """The precision in which int8 engines that mix precisions compute what is in floats, on this machine."""
        return "fp32"

    def quantized_graph(self, precision: Precision) -> str | None:
        """Name of the quantized graph in the folder of a run that engines of a precision are built from; None: none."""
        from compressor.workdir import FP8_GRAPH, QUANTIZED_GRAPH, SYMMETRIC_GRAPH

        if precision not in QUANTIZED:
            return None
        if precision == "fp8":
            return FP8_GRAPH
        return SYMMETRIC_GRAPH if self.symmetric else QUANTIZED_GRAPH

    def sources(self, precision: Precision) -> tuple[str | None, ...]:
        """Names of the graphs of a run that engines of a precision can be built from, fastest first; None: floats.

        A target that quantizes float graphs itself is faster with these.
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

    def needs_quantized_graph(self, precision: Precision) -> bool:
        """Whether an engine of a precision is built from the quantized graph of a run rather than from its float graph.

        A target that quantizes float graphs itself is faster with these.
        """
        return precision in QUANTIZED and not self.quantizes

    def missing(self) -> str | None:
        """What this machine lacks that a deployment machine has, in a few words; None: nothing."""
        return None

    def check_request(
        self, *, precision: Precision = "fp32", provider: Provider | None = None, kernel: Path | None = None
    ) -> None:
        """Raise where requested options contradict the target, on any machine.

        Raises:
            UsageError: the precision is unknown, the target runs on no such provider, or cannot use a kernel.
        """
        if precision not in TOLERANCE:
            raise UsageError(
                f"precision {precision!r}: unknown; use {', '.join(TOLERANCE)}",
                code=ErrorCode.UNKNOWN_NAME,
                field="precision",
                value=precision,
            )
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
                f"--kernel {kernel}: {self.title} cannot use it, it is for ONNX Runtime on the CPU; omit --kernel, or"
                " use --target ort",
                code=ErrorCode.CONTRADICTION,
                fields=("kernel", "target"),
                value=kernel,
            )

    @abstractmethod
    def check(
        self, *, precision: Precision = "fp32", provider: Provider | None = None, kernel: Path | None = None
    ) -> None:
        """Raise where engines cannot be built on this machine, before any work is done for them.

        Raises:
            UsageError: options contradict the target, or the runtime lacks the precision.
            TargetMissingError: the runtime or its device is missing.
        """

    @abstractmethod
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

    @abstractmethod
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

    def run_fixed(self, onnx: Path, feeds: Feeds, *, precision: Precision = "fp32") -> dict[str, np.ndarray]:
        """Outputs of a graph that the runtime reads itself, compiled for the shapes of one batch alone.

        Args:
            onnx: the graph, which is not rewritten for the runtime where this can run it as it is.
            feeds: the batch.
            precision: numeric precision of the graph.

        Raises:
            TargetMissingError: the runtime or its device is missing.
            InputError: the runtime cannot read the graph, or cannot run it at these shapes.
        """
        batch, seq = ((size, size, size) for size in _first_sizes(feeds))
        with tempfile.TemporaryDirectory() as folder:
            options = BuildOptions(batch=batch, seq=seq)
            return self.build(onnx, Path(folder) / self.engine_file, precision=precision, options=options).run(feeds)

    def __call__(
        self,
        onnx: Path,
        out: Path,
        *,
        precision: Precision = "fp32",
        provider: Provider | None = None,
        threads: int | None = None,
        options: BuildOptions | None = None,
    ) -> Engine:
        """Build an engine; see `build`."""
        return self.build(onnx, out, precision=precision, provider=provider, threads=threads, options=options)


def _first_sizes(feeds: Feeds) -> tuple[int, int]:
    """Batch size of a batch, and the length of its rows; 1 where they have none."""
    shapes = [array.shape for array in feeds.values()]
    return shapes[0][0], max((shape[1] for shape in shapes if len(shape) == 2), default=1)
