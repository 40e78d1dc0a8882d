"""Make the tables and figures of `benchmarks.all_attention` from the results of its cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.all_attention_cost import figure1
from benchmarks.all_attention_sizes import ABLATIONS
from benchmarks.studies import figures
from benchmarks.studies.findings import Findings, Picture, Table

if TYPE_CHECKING:
    from benchmarks.all_attention import Study


def describe(study: Study, name: str, cells: list[dict[str, Any]]) -> str:
    """Sizes, tokens read and seeds of the cells of a study, for captions."""
    size, seeds = study.size, sorted({cell["settings"]["seed"] for cell in cells})
    text = sum(study.data.train["length"]) - len(study.data.train) + 1
    dense, again = (f"{steps * size.batch * size.segment:,}" for steps in (size.steps, size.pruning))
    return (
        f"size {name}: width {size.hidden}, {size.layers} layers of {size.heads} heads, {size.persistent} vectors,"
        f" {study.model_folder.config.vocab_size:,} tokens, segment and memory {size.segment}, {size.batch} streams,"
        f" {size.steps} and then {size.pruning} steps, which read {dense} and, from the beginning again, {again}"
        f" tokens of a text of {text:,}, learning rate of gates {size.gate_rate:g}, {size.precision},"
        f" seeds {', '.join(map(str, seeds))}"
    )


def findings_of(study: Study, cells: list[dict[str, Any]], description: str) -> Findings:
    """Tables 1 or 2 and 3, figures 1 and 3."""
    order = [cell.settings["name"] for cell in study.cells((0,))]
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in sorted(cells, key=lambda cell: (order.index(cell["settings"]["name"]), cell["settings"]["seed"])):
        groups.setdefault(cell["settings"]["name"], []).append(cell)
    largest = f"lambda {max(study.size.penalties):g}"
    columns = (
        "model",
        "seeds",
        "heads kept",
        "sparsity, %",
        "parameters, M",
        f"test {study.metric}",
        "each seed",
        f"minus {largest}, each seed",
    )
    sections = {
        "Pruning by lambda (tables 1 and 2)": ("dense", "longer", "pruned"),
        "Without each technique, at the largest lambda (table 3)": ("pruned", "ablated"),
        "Narrower Transformer-XLs (figure 3)": ("transformer-xl",),
    }
    tables = []
    for title, kinds in sections.items():
        table_rows = [
            _row(name, same, groups[largest])
            for name, same in groups.items()
            if same[0]["settings"]["kind"] in kinds and ("ablated" not in kinds or name == largest or name in ABLATIONS)
        ]
        tables.append(Table(f"{title}; {description}", columns, tuple(table_rows)))
    counts = ("heads", "parameters", "seconds")
    rows = [{**cell["settings"], **{name: cell.get(name) for name in counts}, **cell["scores"]} for cell in cells]
    return Findings(rows, tables, [_figure3(study.metric, groups, description), figure1()], ())


def _figure3(metric: str, groups: dict[str, list[dict[str, Any]]], description: str) -> Picture:
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for same in groups.values():
        kind = same[0]["settings"]["kind"]
        if kind not in ("longer", "pruned", "transformer-xl"):
            continue
        name = "Transformer-XL" if kind == "transformer-xl" else "All-attention, whole and pruned"
        size = float(np.mean([cell["parameters"] for cell in same])) / 1e6
        lines.setdefault(name, []).append((size, [cell["scores"]["test"] for cell in same]))
    figure = figures.lines_with_ranges(lines, "parameters without embedding, millions", f"test {metric}")
    return Picture(
        "figure3", "Metric against parameters", f"Mean over seeds and their spread; {description}.", figure, True
    )


def describe_times(cells: list[dict[str, Any]]) -> str:
    """The times of the cells that were not interrupted and that have a stored time, in words."""
    seconds = [cell["seconds"] for cell in cells if cell.get("seconds") is not None]
    if not seconds:
        return "no times are known"
    each = f"{min(seconds):.0f} to {max(seconds):.0f} s each"
    return f"{len(seconds)} of {len(cells)} cells took {sum(seconds) / 60:.1f} minutes, {each}"


def _row(name: str, cells: list[dict[str, Any]], against: list[dict[str, Any]]) -> tuple[str, ...]:
    scores = [cell["scores"]["test"] for cell in cells]
    bases = {cell["settings"]["seed"]: cell["scores"]["test"] for cell in against}
    differences = [cell["scores"]["test"] - bases[cell["settings"]["seed"]] for cell in cells]
    kept, of = (float(np.mean([cell[field] for cell in cells])) for field in ("heads", "of"))
    return (
        name,
        str(len(cells)),
        f"{kept:.1f} of {of:.0f}",
        f"{100 * (1 - kept / of):.1f}",
        f"{np.mean([cell['parameters'] for cell in cells]) / 1e6:.3f}",
        f"{np.mean(scores):.3f}",
        ", ".join(f"{score:.3f}" for score in scores),
        f"{np.mean(differences):+.3f} ({', '.join(f'{difference:+.3f}' for difference in differences)})",
    )
