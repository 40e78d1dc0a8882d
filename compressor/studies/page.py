"""What a study leaves in its folder: `study.csv`, `figures/*.svg`, and `study.html`, which needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compressor.report.templates import environment
from compressor.studies import figures
from compressor.studies.cell_store import CSV_NAME, write, write_csv
from compressor.studies.results import Findings

PAGE_NAME = "study.html"


def save(
    findings: Findings,
    folder: Path,
    *,
    kind: str,
    says: str,
    model: str,
    tiles: Sequence[tuple[str, str, str]],
    facts: Sequence[tuple[str, str]],
) -> None:
    """Write all files, each beside its place and renamed.

    Args:
        found: what to show.
        folder: of the study.
        kind, says, model: for the head of the page.
        tiles: name, number, and what it stands on.
        facts: how it was done, name and value.
    """
    write_csv(folder / CSV_NAME, findings.rows)
    (folder / "figures").mkdir(exist_ok=True)
    drawn = [(picture, figures.styled(picture.figure)) for picture in findings.pictures]
    for picture, svg in drawn:
        write(folder / "figures" / f"{picture.name}.svg", figures.file_text(svg))
    page = (
        environment("studies")
        .get_template("page.html")
        .render(
            name=model,
            kind=kind,
            verdict=says,
            tiles=tiles,
            findings=findings,
            pictures=drawn,
            facts=facts,
        )
    )
    write(folder / PAGE_NAME, page)
