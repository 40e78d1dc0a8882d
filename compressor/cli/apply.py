"""`compress apply`: run the graph passes alone, on any ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from compressor.cli.commands import Command, check_output_file, common
from compressor.cli.console import Console
from compressor.errors import ErrorCode, InputError, SiteRefusedError, UsageError

if TYPE_CHECKING:
    from graph_passes import Plan, Shrunk


@click.command(cls=Command, short_help="Shrink an ONNX graph by a plan.")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("--plan", required=True, metavar="PLAN", type=click.Path(path_type=Path), help="the plan.json to follow")
@click.option("-o", "--out", required=True, metavar="ONNX", type=click.Path(path_type=Path), help="the file to write")
@click.option("--force", is_flag=True, help="replace the file if it exists")
@common
@click.pass_obj
def apply(console: Console, graph: Path, plan: Path, out: Path, force: bool) -> None:
    """Remove from GRAPH, an ONNX file, the heads and neurons that a plan drops, and the blocks that its masks drop.

    Weights that were trained or refitted with the plan are read from model.safetensors beside it. The graph is not run.
    """
    data = out.with_name(f"{out.name}.data")
    check_output_file(out, force=force, also=(data,))
    import graph_passes

    requested = graph_passes.Plan.load(plan)
    with console.stage("reading the graph"):
        model = graph_passes.load(graph)
    sources = graph_passes.data_files(model)
    weights = plan.with_name(graph_passes.WEIGHTS)
    read = {*sources, plan.resolve(), weights.resolve()}
    replaced = next((path for path in (out, data) if path.resolve() in read), None)
    if replaced is not None and (replaced != data or out.resolve() != graph.resolve()):
        raise UsageError.of_file(
            replaced,
            "the command reads this file, and would replace it; write to another file (-o)",
            ErrorCode.CONTRADICTION,
        )
    size = sum(file.stat().st_size for file in {graph.resolve(), *sources})
    with console.stage("shrinking the graph"):
        try:
            file = graph_passes.WeightFile(weights) if weights.is_file() else None
            shrunk = graph_passes.shrink(model, requested, weights=file)
        except graph_passes.PlanError as error:
            message = f"{graph}, {plan}: {error}"
            pruned = plan.with_name("model.onnx")
            if error.code is graph_passes.GraphErrorCode.WEIGHTS_MISSING and pruned.is_file():
                message = f"{graph}, {plan}: the plan belongs to refitted weights; use {pruned}, which has both"
            raise InputError(message, code=ErrorCode.FILE_MISMATCH, path=plan, cause=error.code) from error
    if shrunk.obstacle:
        text = f"{shrunk.obstacle}; keep every unit of the group in {plan} (nothing was written)"
        raise SiteRefusedError.of_file(graph, text, ErrorCode.SITE_REFUSED, refused=shrunk.refused)
    with console.stage("writing the graph"):
        graph_passes.save(shrunk.model, out)
    _print_result(console, requested, shrunk, out, size)


def _print_result(console: Console, requested: Plan, shrunk: Shrunk, out: Path, size: int) -> None:
    """Print what was removed from a graph whose size, with its external data, was `size` bytes."""
    import graph_passes
    from compressor.run.run_notes import emptied_head_notes

    new_size = sum(file.stat().st_size for file in {out.resolve(), *graph_passes.data_files(graph_passes.load(out))})
    dense = {site: str(refusal) for refusal in shrunk.dense for site in sorted(refusal.sites)}
    for site, reason in dense.items():
        console.note(f"{site}: stays dense under its mask ({reason})")
    if shrunk.transferred:
        console.note(f"{len(shrunk.transferred)} weights come from {graph_passes.WEIGHTS} in the folder of the plan")
    for note in emptied_head_notes(requested, shrunk.plan):
        console.note(note)
    parts = []
    if requested.sites:
        parts.append(f"{shrunk.plan.heads_kept} of {requested.heads} heads kept")
    if requested.feed_forwards:
        parts.append(f"{shrunk.plan.neurons_kept:,} of {requested.neurons:,} neurons kept")
    if requested.masks:
        parts.append(f"{len(shrunk.lowered)} of {len(requested.masks)} masked attention layers block-sparse")
    console.result(
        Text(f"{out}: {', '.join(parts)}, {size / 1e6:.1f} MB to {new_size / 1e6:.1f} MB"),
        {
            "out": str(out),
            "heads": requested.heads,
            "kept": shrunk.plan.heads_kept,
            "neurons": requested.neurons,
            "neurons_kept": shrunk.plan.neurons_kept,
            "block_sparse": list(shrunk.lowered),
            "dense": dense,
            "unused_key_blocks": dict(shrunk.unused),
            "transferred": list(shrunk.transferred),
            "bytes": [size, new_size],
        },
    )
