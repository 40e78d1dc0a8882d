"""The output of a study: `study.csv`, `figures/*.svg`, and the self-contained page `study.html`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compressor.report.html import environment
from compressor.studies.cell_store import CSV_NAME, write_csv
from compressor.studies.results import Findings
from compressor.studies.svg import file_text, styled
from graph_passes.files import write_text

PAGE_NAME = "study.html"


def save(
    findings: Findings,
    folder: Path,
    *,
    kind: str,
    description: str,
    model: str,
    tiles: Sequence[tuple[str, str, str]],
    facts: Sequence[tuple[str, str]],
) -> None:
    """Write all files, each under a temporary name that is then renamed.

    Args:
        findings: the findings.
        folder: folder of the study.
        kind, description, model: for the head of the page.
        tiles: heading, number and caption of each tile.
        facts: name and value of each setting.
    """
    write_csv(folder / CSV_NAME, findings.rows)
    (folder / "figures").mkdir(exist_ok=True)
    drawn = [(picture, styled(picture.figure)) for picture in findings.pictures]
    for picture, svg in drawn:
        write_text(folder / "figures" / f"{picture.name}.svg", file_text(svg))
    page = (
        environment("studies")
        .get_template("page.html")
        .render(
            name=model,
            kind=kind,
            verdict=description,
            tiles=tiles,
            findings=findings,
            pictures=drawn,
            facts=facts,
        )
    )
    write_text(folder / PAGE_NAME, page)
