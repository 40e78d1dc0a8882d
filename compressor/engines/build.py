"""Build a variant from its exported graph: shrink the graph, build the engine, and prove both. This needs no
PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import graph_passes
from compressor.config.sections import EngineConfig, ExportConfig
from compressor.engines.prove import Case, prove_engine, prove_products, prove_shrunk, require
from compressor.errors import ErrorCode, MismatchError, SiteRefusedError
from compressor.results import Proof, VariantName
from compressor.targets import BuildOptions, Engine, Feeds, span, target
from compressor.targets.base import Span
from compressor.targets.graph_facts import write_mixed
from graph_passes import Plan, Refusal, Shrunk
from graph_passes.passes import CleanUp, DropUnreadPositions


@dataclass(frozen=True)
class ExportedGraph:
    """The reference graph of a plan, which still contains every unit, gated.

    Attributes:
        name: the variant that it belongs to.
        plan: the plan whose gates and masks it holds.
        path: its file.
        proof: gated model = reference graph.
    """

    name: VariantName
    plan: Plan
    path: Path
    proof: Proof


@dataclass(frozen=True)
class ShrunkGraph:
    """The graph without the units that its plan drops.

    Attributes:
        name: the variant that it belongs to.
        plan: the plan as it was carried out, see `graph_passes.Shrunk`.
        path: its file.
        proofs: gated model = reference graph, and reference graph = shrunk graph.
        lowered: masked sites that are block-sparse in the graph.
        dense: masked sites that were to be block-sparse, with the operator that prevents it.
        unused: site -> number of key blocks that are not projected.
        thinned: names of the matmuls that compute only the positions that are read.
        shared: sites whose dropped queries or keys are still computed, with the norm that reads all heads.
    """

    name: VariantName
    plan: Plan
    path: Path
    proofs: tuple[Proof, ...]
    lowered: tuple[str, ...] = ()
    dense: tuple[Refusal, ...] = ()
    unused: Mapping[str, int] = field(default_factory=dict)
    thinned: tuple[str, ...] = ()
    shared: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One side of the comparison, ready to be scored and timed.

    Attributes:
        graph: the graph that the engine was built from.
        engine: the loaded engine.
        proofs: the proofs of the graph, and shrunk graph = engine.
    """

    graph: ShrunkGraph
    engine: Engine
    proofs: tuple[Proof, ...]

    @property
    def name(self) -> VariantName:
        """`dense`, `rewritten` or `compressed`."""
        return self.graph.name


def drops_unread(export: ExportConfig, engine: EngineConfig) -> bool:
    """Whether compressed graphs lack the positions that no output depends on: the settings and the runtime allow it."""
    return not export.keep_unread_positions and target(engine.reference.target).drops_positions


def shrink_graph(
    reference: ExportedGraph,
    cases: Sequence[Case],
    out: Path,
    *,
    name: VariantName | None = None,
    lower: Collection[str] = (),
    drop_unread: bool = False,
) -> ShrunkGraph:
    """Remove what the plan drops from a reference graph, and prove the result.

    Args:
        name: name of the variant; None: that of the reference graph.
        lower: masked sites to make block-sparse.
        drop_unread: whether positions that no output depends on are dropped too.

    Raises:
        SiteRefusedError: a site cannot be shrunk.
        MismatchError: the shrunk graph computes something else.
    """
    shrunk = require_complete(shrink(reference.path, reference.plan, lower))
    name = name or reference.name
    unread: tuple[str, ...] = ()
    if drop_unread:
        unread = DropUnreadPositions()(shrunk.model).report
        CleanUp()(shrunk.model)
    graph_passes.save(shrunk.model, out)
    proof = require(prove_shrunk(reference.path, out, cases, name))
    return ShrunkGraph(
        name=name,
        plan=shrunk.plan,
        path=out,
        proofs=(reference.proof, proof),
        lowered=shrunk.lowered,
        dense=shrunk.dense,
        unused=shrunk.unused,
        thinned=unread,
        shared=shrunk.shared,
    )


def build_variant(
    graph: ShrunkGraph,
    config: EngineConfig,
    options: BuildOptions,
    cases: Sequence[Case],
    *,
    quantized: Path | None = None,
    folder: Path | None = None,
) -> Variant:
    """Build the engine of a graph, and prove it.

    Args:
        quantized: the quantized graph to build from; None: the shrunk graph.
        folder: folder of the engine; None: that of the shrunk graph.

    Raises:
        TargetMissingError: the runtime or its device is missing.
        MismatchError: the engine computes something else than the graph, or computes quantized matmuls in floats.
    """
    folder, source = folder or graph.path.parent, quantized or graph.path
    # The dense engine is the runtime's own, without rewrites.
    if graph.name == "dense":
        options = replace(options, norm_seconds=0.0)
    engine = build_engine(source, folder, config, options)
    require_precision(engine, config)
    proofs = prove_build(engine, graph.path, config, options, cases, graph.name, quantized=quantized)
    return Variant(graph, engine, (*graph.proofs, *proofs))


def prove_build(
    engine: Engine,
    graph: Path,
    config: EngineConfig,
    options: BuildOptions,
    cases: Sequence[Case],
    name: VariantName,
    *,
    quantized: Path | None = None,
) -> tuple[Proof, ...]:
    """Prove an engine: its int8 matmuls one by one, and the whole.

    Args:
        graph: the graph that it was built from, unless `quantized` is given.
        config: target and precision, with which the matmuls are built alone.
        quantized: the quantized graph that it was built from; None: it was built from `graph`.

    Raises:
        MismatchError: a proof does not hold.
    """
    tolerance = target(config.target).tolerance
    if quantized is None:
        return (require(prove_engine(graph, engine, cases, name, tolerance)),)

    def build_products(path: Path, feeds: Sequence[Feeds]) -> Engine:
        # Products have other inputs than the graph, and are proven in fp32 outside of their sums.
        batch, seq = spans_of(feeds)
        plain = replace(
            options, shapes=(), norm_seconds=0.0, batch=batch, seq=seq, float_widths=frozenset(), float_precision="fp32"
        )
        return build_engine(path, path.parent, config, plain)

    with tempfile.TemporaryDirectory() as scratch:
        source = write_mixed(quantized, options.float_widths, Path(scratch) / quantized.name)
        products = require(prove_products(source, build_products, cases, name))
        return (products, require(prove_engine(source, engine, cases, name, tolerance)))


def spans_of(batches: Sequence[Feeds]) -> tuple[Span, Span]:
    """The spans of sizes of arbitrary inputs: of their first axes, and of all others.

    Only axes whose size differs between batches count; the others are fixed. A first axis may count tokens, as in the
    input of a `Gemm`.
    """
    first_axes: list[int] = []
    further_axes: list[int] = []
    for name in batches[0]:
        for axis, lengths in enumerate(zip(*(batch[name].shape for batch in batches), strict=True)):
            if len(set(lengths)) > 1:
                (further_axes if axis else first_axes).extend(lengths)
    return span(first_axes or [1]), span(further_axes or [1])


def require_precision(engine: Engine, config: EngineConfig) -> None:
    """Check that the runtime executes every quantized matmul in int8, and every matmul of a bf16 engine in bf16.

    Raises:
        MismatchError: the runtime computes some in fp32, and the configuration does not accept that.
    """
    if config.allow_float_products:
        return
    if engine.precision == "bf16" and (in_fp32 := engine.products.get("fp32", 0)):
        raise MismatchError(
            f"{config.target}: {in_fp32} of {sum(engine.products.values())} matmuls are computed in fp32 instead of "
            f"bf16; accept this with --allow-float-products, or use --precision fp32",
            code=ErrorCode.PRODUCTS_IN_FLOAT,
            requested=sum(engine.products.values()),
            executed=engine.products.get("bf16", 0),
        )
    products = engine.quantized
    if products is None:
        return
    if products.executed >= products.requested and not products.in_float:
        return
    names = f", among them {', '.join(products.in_float[:3])}" if products.in_float else ""
    raise MismatchError(
        f"{config.target}: {max(products.requested - products.executed, len(products.in_float))} of "
        f"{products.requested} quantized matmuls are computed in floats{names}; accept this with "
        f"--allow-float-products, or use another target",
        code=ErrorCode.PRODUCTS_IN_FLOAT,
        requested=products.requested,
        executed=products.executed,
        products=products.in_float,
    )


def build_engine(graph: Path, folder: Path, config: EngineConfig, options: BuildOptions) -> Engine:
    """Build the engine of a graph into a folder, under the target's file name for engines.

    Raises:
        TargetMissingError: the runtime or its device is missing.
    """
    runtime = target(config.target)
    # A mixed graph is as large as the graph, beside which there is room for it.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        return runtime(
            write_mixed(graph, options.float_widths, Path(scratch) / graph.name),
            folder / runtime.engine_file,
            precision=config.definite_precision,
            provider=config.provider,
            threads=config.threads,
            options=options,
        )


def shrink(reference: Path, plan: Plan, lower: Collection[str] = ()) -> Shrunk:
    """The graph without the heads that the plan drops, and block-sparse at the sites in `lower`."""
    return graph_passes.shrink(graph_passes.load(reference), plan, lower=lower)


def require_complete(shrunk: Shrunk) -> Shrunk:
    """The result of shrinking, if no site was refused.

    Raises:
        SiteRefusedError: a site was refused; the message names the operator that prevents it.
    """
    if shrunk.obstacle:
        text = (
            f"{shrunk.obstacle}; keep every head of the site in a plan (--plan), or try --attention sdpa or --opset 23"
        )
        raise SiteRefusedError(text, code=ErrorCode.SITE_REFUSED, refused=shrunk.refused)
    return shrunk
