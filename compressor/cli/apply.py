"""`compress apply`: the graph passes alone, on any ONNX file."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.errors import InputError, SiteRefusedError, UsageError


@click.command(short_help="Shrink an ONNX graph by a plan.")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("--plan", required=True, metavar="PLAN", type=click.Path(path_type=Path), help="The plan.json to follow.")
@click.option("-o", "--out", required=True, metavar="ONNX", type=click.Path(path_type=Path), help="The file to write.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@common
@click.pass_obj
def apply(view: Console, graph: Path, plan: Path, out: Path, force: bool) -> None:
    """Remove from GRAPH, an ONNX file, the heads that a plan drops, and compute the blocks of its masks alone.

    The graph is taken as it is and not run.
    """
    for there in (out, out.with_name(f"{out.name}.data")):
        if there.exists() and not force:
            raise UsageError(f"{there}: is there already; add --force to replace it, or name another file (-o)")
    if out.is_dir():
        raise UsageError(f"{out}: is a folder; name the file to write (-o)")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder; make it, or name another file (-o)")
    import graph_passes
    from compressor.report import formatting

    wanted = graph_passes.Plan.load(plan)
    with view.stage("reading the graph"):
        model = graph_passes.load(graph)
    read = graph_passes.data_files(model)
    if out.with_name(f"{out.name}.data").resolve() in read and out.resolve() != graph.resolve():
        raise UsageError(f"{out}.data: holds the weights of {graph}; name another file (-o)")
    before = sum(file.stat().st_size for file in {graph.resolve(), *read})
    with view.stage("shrinking the graph"):
        try:
            shrunk = graph_passes.shrink(model, wanted)
        except graph_passes.PlanError as error:
            raise InputError(f"{graph}, {plan}: {error}") from error
    if shrunk.obstacle:
        raise SiteRefusedError(
            f"{graph}: {shrunk.obstacle}; keep every head of the site in {plan} (nothing was written)"
        )
    with view.stage("writing the graph"):
        graph_passes.save(shrunk.model, out)
    after = sum(file.stat().st_size for file in {out.resolve(), *graph_passes.data_files(graph_passes.load(out))})
    stayed = {site: str(found) for found in shrunk.dense for site in sorted(found.sites)}
    for site, why in stayed.items():
        view.note(f"{site}: stays dense under its mask ({why})")
    if emptied := formatting.emptied(wanted, shrunk.plan):
        view.note(emptied)
    told = f"{out}: {shrunk.plan.heads_kept} of {wanted.heads} heads kept"
    if wanted.masks:
        told += f", {len(shrunk.lowered)} of {len(wanted.masks)} masked attention layers block-sparse"
    view.result(
        Text(f"{told}, {before / 1e6:.1f} MB to {after / 1e6:.1f} MB"),
        {
            "out": str(out),
            "heads": wanted.heads,
            "kept": shrunk.plan.heads_kept,
            "block_sparse": list(shrunk.lowered),
            "dense": stayed,
            "unused_key_blocks": dict(shrunk.unused),
            "bytes": [before, after],
        },
    )
