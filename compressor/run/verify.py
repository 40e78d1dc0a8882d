"""Proofs that each product of a run computes the same function as the one before it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from compressor.errors import ErrorCode, InputError, MismatchError
from compressor.results import Proof, ProofStage, VariantName
from compressor.run.products import Case
from compressor.targets.base import QUANTIZED, TOLERANCE, Engine, Feeds, Precision
from compressor.targets.relative_error import Outputs, ReferenceOutputs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from compressor.units.hook import Attention
    from graph_passes import Plan

_PRODUCT_TOLERANCE = 1e-2
"""Largest relative error of a product in 8 bits: a factor on the boundary of two numbers may be rounded to either."""
Run = Callable[[Feeds], Outputs]

_SIZES = ((1, 5), (2, 17), (3, 32))
"""Batch sizes and lengths of the inputs of a proof. Rows of padded batches differ in length."""


def make_cases(
    inputs: Callable[[int, int, int], Mapping[str, Tensor]],
    *,
    maximum_length: int | None = None,
    mask_reach: int | None = None,
    shapes: Sequence[tuple[int, int]] = (),
) -> tuple[Case, ...]:
    """Batches of several sizes, with and without padding; memories are empty, half full and full in turn.

    Args:
        inputs: makes a batch of the model's inputs from (batch size, length, seed); its last row is padded.
        maximum_length: maximum number of positions of the model; None: no limit.
        mask_reach: positions that a plan's masks cover; no batch is longer, and one has this length. None: no masks.
        shapes: further batch sizes and lengths, e.g. those that an engine is compiled for.
    """
    sizes = (*_SIZES, *shapes) if mask_reach is None else (*_SIZES, *shapes, (2, mask_reach))
    limit = min((size for size in (maximum_length, mask_reach) if size is not None), default=None)
    cases: dict[tuple[tuple[str, tuple[int, ...]], ...], Case] = {}
    for seed, (batch, seq) in enumerate(sizes):
        tensors = inputs(batch, seq if limit is None else min(seq, limit), seed)
        feeds = {name: tensor.numpy() for name, tensor in tensors.items()}
        for name in (name for name in feeds if name.startswith("memory_")):
            feeds[name] = feeds[name][:, : seed * feeds[name].shape[1] // (len(sizes) - 1)]
        # A model of a single length gives the same shapes again; one case is enough.
        cases.setdefault(tuple((name, array.shape) for name, array in feeds.items()), Case(feeds, case_name(feeds)))
    return tuple(cases.values())


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


def prove_export(
    model: PreTrainedModel,
    plan: Plan,
    graph: Path,
    cases: Sequence[Case],
    variant: VariantName,
    *,
    attention: Attention,
) -> Proof:
    """Compare the gated PyTorch model with its reference graph.

    Each case runs on a copy of the model that nothing has run on before: a model may change at an input.

    Args:
        model: the model, which stays as it is; to be the reference, nothing has run on it.
        plan: the plan, whose dropped units the gates switch off.
        graph: the reference graph.
        cases: the inputs.
        variant: name of the variant.
        attention: form of attention in the graph.

    Raises:
        InputError: the graph does not run on inputs of some size that the model reads, or the model's own outputs are
            not finite.
    """
    import torch
    from transformers.exporters.utils import get_leaf_tensors

    from compressor.model_folder import copy_of
    from compressor.run.finite_outputs import require_defined
    from compressor.silence_libraries import quiet_transformers
    from compressor.units import gated
    from compressor.units.find import evaluation_mode
    from compressor.units.hook import family

    run = _run_of(graph)

    def run_exported(feeds: Feeds) -> Outputs:
        try:
            return run(feeds)
        except InputError as error:
            raise InputError(
                f"{family(model)}: the exported graph does not run on {case_name(feeds)}, as the model does ({error});"
                " the exporter of transformers fixes a size of this family: export another head or form of attention",
                code=ErrorCode.EXPORT_FAILED,
                family=family(model),
            ) from error

    expected: list[Outputs] = []
    for case in cases:
        inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items()}
        fresh = copy_of(model)
        with (
            gated(fresh, plan, attention=attention) as gated_model,
            evaluation_mode(fresh),
            quiet_transformers(),
            torch.no_grad(),
        ):
            # By the names that the exporter gives to outputs, also to parts of sequences and to a single tensor.
            outputs = {name: value.numpy() for name, value in get_leaf_tensors(gated_model(**inputs)).items()}
            require_defined(gated_model, inputs, outputs)
        expected.append(outputs)
    return _prove(ProofStage.EXPORT, variant, cases, expected, run_exported, TOLERANCE["fp32"])


def prove_shrunk(reference: Path, shrunk: Path, cases: Sequence[Case], variant: VariantName) -> Proof:
    """Compare the reference graph with the shrunk one; the runtime optimizes neither.

    Args:
        reference: the reference graph, whose gates switch off what the plan drops.
        shrunk: the graph without it.
        cases: the inputs.
        variant: name of the variant.
    """
    expected = graph_outputs(reference, cases)
    return _prove(ProofStage.SHRINK, variant, cases, expected, _run_of(shrunk), TOLERANCE["fp32"])


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

    Args:
        shrunk: the graph that the engine was built from.
        engine: the engine.
        cases: the inputs.
        variant: name of the variant.
        tolerances: largest relative error of the target's engines by precision.
    """
    from compressor.targets.graph_facts import is_quantized
    from graph_passes import load

    if engine.precision in QUANTIZED:
        expected = graph_outputs(shrunk if is_quantized(load(shrunk)) else engine.path, cases)
        tolerance = tolerances[engine.precision]
        return _prove(ProofStage.BUILD_INT8, variant, cases, expected, engine.run, tolerance)
    expected = graph_outputs(shrunk, cases)
    # Integer kernels round where the operators of the graph do not.
    precision = "fp16" if engine.precision == "fp32" and is_quantized(load(shrunk)) else engine.precision
    return _prove(ProofStage.BUILD, variant, cases, expected, engine.run, tolerances[precision])


def prove_products(
    quantized: Path, build: Callable[[Path, Sequence[Feeds]], Engine], cases: Sequence[Case], variant: VariantName
) -> Proof:
    """Compare each int8 product of a runtime with the float product of its dequantized factors.

    The products are computed one by one, from the activations that they have in the quantized graph.

    Args:
        quantized: the quantized graph.
        build: builds an engine in 8 bits from a graph, for inputs of the same sizes as those that it receives.
        cases: inputs of the graph.
        variant: name of the variant.
    """
    from compressor.quantization.matmuls import activations_graph, matmuls_graph
    from graph_passes import load, save

    with tempfile.TemporaryDirectory() as folder:
        activations, products = Path(folder) / "activations.onnx", Path(folder) / "products.onnx"
        save(activations_graph(load(quantized)), activations)
        run = _run_of(activations)
        operands = [Case({**case.feeds, **run(case.feeds)}, case.name) for case in cases]
        save(matmuls_graph(load(quantized), [case.feeds for case in operands]), products)
        expected = graph_outputs(products, operands)
        engine = build(products, [case.feeds for case in operands])
        return _prove(ProofStage.PRODUCTS, variant, operands, expected, engine.run, _PRODUCT_TOLERANCE)


def prove_fixed(
    run: Run,
    fixed: Sequence[Case],
    others: Sequence[Case],
    expected: Sequence[Outputs],
    variant: VariantName,
    tolerance: float,
) -> Proof:
    """Compare a graph with itself, compiled by a runtime for the shapes of single batches.

    Args:
        run: runs one batch at its own shapes.
        fixed: the inputs that are compared.
        others: inputs of other sizes, by whose outputs errors are scaled too.
        expected: outputs of the graph (`graph_outputs`) for `fixed`, then for `others`.
        variant: name of the variant.
        tolerance: largest relative error.
    """
    return _prove(ProofStage.FIXED_SHAPE, variant, fixed, expected, run, tolerance, others)


def require(proof: Proof) -> Proof:
    """The proof, if it holds.

    Raises:
        MismatchError: it does not hold.
    """
    if not proof.holds:
        raise MismatchError(
            f"{proof.variant}: {proof.stage} does not hold: relative error {proof.error:.3g} where at most"
            f" {proof.tolerance:g} is allowed, on {'; '.join(proof.cases)}; do not use the result, and please report"
            " the family of the model",
            code=ErrorCode.NUMBERS_DIFFER,
            variant=proof.variant,
            stage=proof.stage,
            error=proof.error,
            outputs=proof.failing,
        )
    return proof


def _run_of(path: Path) -> Run:
    from compressor.targets.onnxruntime.ort_session import unoptimized_runner

    return unoptimized_runner(path)


def graph_outputs(path: Path, cases: Sequence[Case]) -> list[Outputs]:
    """Outputs of a graph that the runtime does not optimize, for each case."""
    run = _run_of(path)
    return [run(case.feeds) for case in cases]


def _prove(
    stage: ProofStage,
    variant: VariantName,
    cases: Sequence[Case],
    expected: Sequence[Outputs],
    run: Run,
    tolerance: float,
    others: Sequence[Case] = (),
) -> Proof:
    """The proof on some cases; `expected` holds their outputs, then those of `others`, by which errors are scaled."""
    if not cases:
        _mismatch(stage, variant, "there are no inputs to compare on; export the graph with free axes")
    errors: dict[str, float] = {}
    reference = ReferenceOutputs(expected, [case.feeds for case in (*cases, *others)])
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
