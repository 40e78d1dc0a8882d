"""Proofs that each graph and engine computes the same function as what it comes from.

They need neither PyTorch nor transformers; `prove_export` compares with the PyTorch model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from compressor.errors import CompressorError, ErrorCode, MismatchError, TargetMissingError, UsageError
from compressor.progress import RunLog
from compressor.results import CACHED_STAGES, Note, NoteCode, Proof, ProofStage, VariantName
from compressor.targets import TARGETS, Target, target
from compressor.targets.base import QUANTIZED, TOLERANCE, Engine, Feeds, Precision
from compressor.targets.graph_facts import is_quantized, stored_precision
from compressor.targets.relative_error import Outputs, ReferenceOutputs
from compressor.workdir import QUANTIZED_GRAPHS
from graph_passes import load, save

_REMEDY = "do not use the result"
_CACHED_REMEDIES = {
    **dict.fromkeys(CACHED_STAGES, "compress the model with --no-cache, which leaves out these graphs"),
    ProofStage.CACHED_WEIGHTS: "compress the model with --precision fp32",
}
"""Proof -> how to leave out the graphs or the precision for which it does not hold."""
_PRODUCT_TOLERANCE = 1e-2
"""Largest relative error of a matmul in 8 bits: a factor on the boundary of two numbers may be rounded to either."""
Run = Callable[[Feeds], Outputs]
Inputs = Callable[[int, int, int], Mapping[str, npt.ArrayLike]]
"""Makes a batch of a model's inputs, as tensors or arrays, from (batch size, length, seed)."""

_SIZES = ((1, 5), (2, 17), (3, 32))
"""Batch sizes and lengths of the inputs of a proof. Rows of padded batches differ in length."""


@dataclass(frozen=True)
class Case:
    """One batch of inputs for the proofs.

    Attributes:
        feeds: input name -> array.
        name: description for readers: `batch 2, length 17, padded`.
    """

    feeds: Feeds
    name: str


def make_cases(
    inputs: Inputs,
    *,
    maximum_length: int | None = None,
    mask_reach: int | None = None,
    shapes: Sequence[tuple[int, int]] = (),
) -> tuple[Case, ...]:
    """Batches of several sizes, with and without padding; memories are empty, half full and full in turn.

    Args:
        inputs: makes a batch of the model's inputs, whose last row is padded.
        maximum_length: maximum number of positions of the model; None: no limit.
        mask_reach: positions that a plan's masks cover; no batch is longer, and one has this length. None: no masks.
        shapes: further batch sizes and lengths, e.g. those that an engine is compiled for.
    """
    sizes = (*_SIZES, *shapes) if mask_reach is None else (*_SIZES, *shapes, (2, mask_reach))
    limit = min((size for size in (maximum_length, mask_reach) if size is not None), default=None)
    cases: dict[tuple[tuple[str, tuple[int, ...]], ...], Case] = {}
    for seed, (batch, seq) in enumerate(sizes):
        tensors = inputs(batch, seq if limit is None else min(seq, limit), seed)
        feeds = {name: np.asarray(tensor) for name, tensor in tensors.items()}
        for name in (name for name in feeds if name.startswith("memory_")):
            feeds[name] = feeds[name][:, : seed * feeds[name].shape[1] // (len(sizes) - 1)]
        # A model of a single length gives the same shapes again; one case is enough.
        cases.setdefault(tuple((name, array.shape) for name, array in feeds.items()), Case(feeds, case_name(feeds)))
    return tuple(cases.values())


def proven_shapes(batches: Sequence[int], lengths: Sequence[int | None]) -> list[tuple[int, int]]:
    """The timed sizes that proofs cover: every length, with the smallest and the largest batch.

    A graph may be right up to some length only, e.g. the length of a chunk of linear attention.
    """
    return [(batch, length) for length in lengths if length is not None for batch in {min(batches), max(batches)}]


def both_sides(switches: Iterable[int], shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths on both sides of some switches, greater than `shortest` and at most `longest`."""
    sides = {length for switch in switches for length in (switch, switch + 1)}
    return tuple(sorted(length for length in sides if shortest < length <= longest))


def longest_text(cases: Sequence[Case]) -> int:
    """Tokens of the longest text of the cases; 0 without texts."""
    texts = [array for case in cases for name, array in case.feeds.items() if name.endswith("input_ids")]
    return max((array.shape[-1] for array in texts), default=0)


def case_name(feeds: Feeds) -> str:
    """A batch in words: `batch 2, length 17, padded`."""
    first = next(iter(feeds.values()))
    parts = [f"batch {first.shape[0]}"]
    if first.ndim == 2:
        parts.append(f"length {first.shape[1]}")
    if any("mask" in name and not array.all() for name, array in feeds.items()):
        parts.append("padded")
    if "memory_0" in feeds:
        parts.append(f"memory {feeds['memory_0'].shape[1]}")
    return ", ".join(parts)


def prove_shrunk(reference: Path, shrunk: Path, cases: Sequence[Case], variant: VariantName) -> Proof:
    """Compare the reference graph with the shrunk one; the runtime optimizes neither."""
    expected = graph_outputs(reference, cases)
    tolerance = TOLERANCE[stored_precision(load(shrunk))]
    return prove_outputs(ProofStage.SHRINK, variant, cases, expected, unoptimized(shrunk), tolerance)


def prove_engine(
    shrunk: Path,
    engine: Engine,
    cases: Sequence[Case],
    variant: VariantName,
    tolerances: Mapping[Precision, float] = TOLERANCE,
) -> Proof:
    """Compare a graph, which the runtime does not optimize, with the engine built from it.

    An engine in 8 bits is compared with its quantized graph: the graph that it was built from, or its own file if the
    target quantized a float graph.
    """
    if engine.precision in QUANTIZED:
        expected = graph_outputs(shrunk if is_quantized(load(shrunk)) else engine.path, cases)
        tolerance = tolerances[engine.precision]
        return prove_outputs(ProofStage.BUILD_INT8, variant, cases, expected, engine.run, tolerance)
    expected = graph_outputs(shrunk, cases)
    # Integer kernels round where the operators of the graph do not.
    graph, precision = load(shrunk), engine.precision
    if precision == "fp32":
        precision = "fp16" if is_quantized(graph) else stored_precision(graph)
    return prove_outputs(ProofStage.BUILD, variant, cases, expected, engine.run, tolerances[precision])


def prove_products(
    quantized: Path, build: Callable[[Path, Sequence[Feeds]], Engine], cases: Sequence[Case], variant: VariantName
) -> Proof:
    """Compare each int8 matmul of a runtime with the float matmul of its dequantized factors.

    The matmuls are computed one by one, from the activations that they have in the quantized graph.

    Args:
        build: builds an engine in 8 bits from a graph, for inputs of the same sizes as those that it receives.
    """
    from compressor.quantization.matmuls import activations_graph, matmuls_graph

    with tempfile.TemporaryDirectory() as folder:
        activations, products = Path(folder) / "activations.onnx", Path(folder) / "products.onnx"
        save(activations_graph(load(quantized)), activations)
        run = unoptimized(activations)
        operands = [Case({**case.feeds, **run(case.feeds)}, case.name) for case in cases]
        save(matmuls_graph(load(quantized), [case.feeds for case in operands]), products)
        expected = graph_outputs(products, operands)
        engine = build(products, [case.feeds for case in operands])
        return prove_outputs(ProofStage.PRODUCTS, variant, operands, expected, engine.run, _PRODUCT_TOLERANCE)


def require(proof: Proof) -> Proof:
    """The proof, if it holds.

    Raises:
        MismatchError: the proof does not hold.
    """
    if not proof.holds:
        raise MismatchError(
            f"{proof.variant}: {proof.stage} does not hold: relative error {proof.error:.3g} where at most"
            f" {proof.tolerance:g} is allowed, on {'; '.join(proof.cases)};"
            f" {_CACHED_REMEDIES.get(proof.stage, _REMEDY)}, and please report the family of the model",
            code=ErrorCode.NUMBERS_DIFFER,
            variant=proof.variant,
            stage=proof.stage,
            error=proof.error,
            outputs=proof.failing,
        )
    return proof


def unoptimized(path: Path) -> Run:
    """Runs a graph that the runtime does not optimize."""
    from compressor.targets.onnxruntime.ort_session import unoptimized_runner

    return unoptimized_runner(path)


def graph_outputs(path: Path, cases: Sequence[Case]) -> list[Outputs]:
    """Outputs of a graph that the runtime does not optimize, for each case."""
    run = unoptimized(path)
    return [run(case.feeds) for case in cases]


def prove_outputs(
    stage: ProofStage,
    variant: VariantName,
    cases: Sequence[Case],
    expected: Sequence[Outputs],
    run: Run,
    tolerance: float,
    further: Sequence[Case] = (),
) -> Proof:
    """The proof on some cases.

    Args:
        expected: outputs of the reference for `cases`, then for `further`.
        further: more inputs; errors are scaled by their outputs too.

    Raises:
        MismatchError: there are no inputs, or an output is missing or unexpected.
    """
    if not cases:
        _mismatch(stage, variant, "there are no inputs to compare on; export the graph with free axes")
    errors: dict[str, float] = {}
    reference = ReferenceOutputs(expected, [case.feeds for case in (*cases, *further)])
    for number, case in enumerate(cases):
        references = reference.outputs[number]
        outputs = run(case.feeds)
        # A model may return more tensors than its graph has outputs.
        missing = set() if stage is ProofStage.EXPORT and outputs else references.keys() - outputs.keys()
        if missing and outputs.keys() <= references.keys():
            _mismatch(stage, variant, f"the output {min(missing)} is missing; export again")
        for name, output in outputs.items():
            if name not in references:
                _mismatch(stage, variant, f"unexpected output {name}, expected {', '.join(references)}; export again")
            errors[name] = max(errors.get(name, 0.0), reference.error(number, name, output))
    return Proof(
        stage=stage,
        variant=variant,
        error=max(errors.values(), default=0.0),
        tolerance=tolerance,
        cases=tuple(case.name for case in cases),
        failing=tuple(name for name, error in errors.items() if not error <= tolerance),
    )


def _mismatch(stage: ProofStage, variant: VariantName, reason: str) -> NoReturn:
    raise MismatchError(f"{variant}: {stage}: {reason}", code=ErrorCode.OUTPUTS_DIFFER, variant=variant, stage=stage)


def prove_graphs(
    folder: Path, cases: Sequence[Case], log: RunLog, graphs: Mapping[str, Path] | None = None
) -> tuple[Proof, ...]:
    """Prove the graphs of a folder in each installed runtime that may read them, compiled for a batch of one row.

    Other programs than `compress` may run a graph: without its rewrites, and often at one shape, for which a runtime
    may choose different kernels. If a graph does not hold in a runtime, a note says so; the delivered engine has proofs
    of its own.

    Args:
        cases: inputs of the proofs; those of one row are compared.
        graphs: name in the folder -> file, of float graphs that are not in the folder yet; None: there are none.

    Returns:
        The proofs that hold.
    """
    fixed = [case for case in cases if _is_one_row(case)]
    if not fixed:
        return ()
    batched = [case for case in cases if not _is_one_row(case)]
    files = {name: folder / name for name in ("model.onnx", *QUANTIZED_GRAPHS) if (folder / name).is_file()}
    proofs = []
    for name, path in {**files, **(graphs or {})}.items():
        expected: list[Outputs] = []  # the same for every runtime
        for runtime, precision in _readers(name):
            with log.stage(f"{name}: proving it at fixed shapes in {runtime.title}"):
                try:
                    expected = expected or graph_outputs(path, (*fixed, *batched))
                    proof = _prove_fixed(path, name, runtime, precision, fixed, batched, expected)
                    reason = "" if proof.holds else f"its outputs differ by {proof.error:.2g} of their size"
                except CompressorError as error:
                    proof, reason = None, str(error)
            if proof is not None and proof.holds:
                proofs.append(proof)
                continue
            text = (
                f"{name}: do not run it in {runtime.title} at a fixed shape ({reason}); {_remedy(runtime, precision)}"
            )
            log.add_notes([Note(code=NoteCode.GRAPH_WRONG_IN_RUNTIME, text=text)])
    return tuple(proofs)


def _is_one_row(case: Case) -> bool:
    """Whether a case has one row, and no memory of length 0, which is no shape to compile for."""
    arrays = case.feeds.values()
    return next(iter(arrays)).shape[0] == 1 and all(array.size for array in arrays)


def _readers(name: str) -> Iterator[tuple[Target, Precision]]:
    """The installed runtimes that may read a graph of the folder, with the precision that it then has."""
    for runtime in map(target, TARGETS):
        for precision in runtime.tried_precisions:
            is_source = runtime.quantized_graph(precision) == name
            if is_source or (name not in QUANTIZED_GRAPHS and precision == "fp32"):
                try:
                    runtime.check(precision=precision)
                except (TargetMissingError, UsageError):
                    continue
                yield runtime, precision


def _prove_fixed(
    path: Path,
    name: str,
    runtime: Target,
    precision: Precision,
    fixed: Sequence[Case],
    batched: Sequence[Case],
    expected: Sequence[Outputs],
) -> Proof:
    """Compare a graph with itself, compiled by a runtime for the shapes of single batches.

    `expected` holds the outputs of the graph for `fixed`, then for `batched`, by which errors are scaled too.
    """
    named = [replace(case, name=f"{name} in {runtime.title}, {case.name}") for case in fixed]
    variant: VariantName = "dense" if name == "dense.onnx" else "compressed"

    def run(feeds: Feeds) -> Outputs:
        return runtime.run_fixed(path, feeds, precision=precision)

    return prove_outputs(ProofStage.FIXED_SHAPE, variant, named, expected, run, TOLERANCE[precision], batched)


def _remedy(runtime: Target, precision: Precision) -> str:
    # The precision is named for floats too: without it, the engine has the precision of the run.
    return f"build a proven engine from it with compress build OUT --target {runtime.name} --precision {precision}"
