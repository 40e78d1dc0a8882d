"""Advice of `studies`: see `tests.advice.world`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.studies.__main__ import studies
from compressor.cli.console import Console
from tests import folders
from tests.advice.world import World, advice


def command(*words: str) -> None:
    """Run `python -m benchmarks.studies` in this process; its errors are raised."""
    studies.main(list(words), obj=Console(), standalone_mode=False)


def study(w: World, kind: str, *flags: Any) -> tuple[Any, ...]:
    """A study, which is right once its cells are known."""
    w.patch.setattr("benchmarks.studies.cell_store.CellStore.run", w.stop)
    rows = () if "--data" in flags else ("--data", "rows.tsv")
    return (command, kind, "model", *rows, "--size", "tiny", "-o", "out", *flags)


@advice("studies.__main__ studies unknown-name")
def _(w: World) -> None:
    w.fails(command, "grid", "model", "--size", "smal", "--data", "rows.tsv")
    w.patch.setattr("benchmarks.studies.run.study", w.stop)
    w.right(command, "grid", "model", "--size", "small", "--data", "rows.tsv")


@advice("studies.request axes_of missing-value")
def _(w: World) -> None:
    w.patch.setattr("benchmarks.studies.run.study", w.stop)
    w.fails(*study(w, "grid", "--seeds", ","))
    w.right(*study(w, "grid", "--seeds", "0,1"))


@advice("studies.ablate Ablate.check contradiction")
def _(w: World) -> None:
    w.fails(*study(w, "ablate", "--options", "rows=8"))
    w.right(*study(w, "ablate"))


@advice("studies.astar AStar.check unknown-name")
def _(w: World) -> None:
    w.fails(*study(w, "astar", "--variants", "lasy"))
    w.right(*study(w, "astar", "--variants", "lazy"))


@advice("studies.astar AStar.check contradiction")
def _(w: World) -> None:
    w.fails(*study(w, "astar", "--options", "variant=lazy"))
    w.right(*study(w, "astar", "--variants", "lazy", "--budgets", "1,2"))


@advice("studies.astar AStar.cells missing-value")
def _(w: World) -> None:
    folders.save(folders.gpt2(), w.model)
    w.rows("text.txt", *("the good film was very good and not at all bad ever" for _ in range(40)))
    w.fails(*study(w, "astar", "--data", "text.txt"))
    w.right(*study(w, "astar", "--data", "text.txt", "--budgets", "0.1"))


@advice("studies.base Study.keeps text")
def _(w: World) -> None:
    w.fails(*study(w, "grid", "--keeps", "9"))
    w.right(*study(w, "grid", "--keeps", "1"))


@advice("studies.run check contradiction")
def _(w: World) -> None:
    w.fails(*study(w, "grid", "--budgets", "1"))
    w.right(*study(w, "grid", "--methods", "dsp", "--keeps", "1", "--seeds", "0"))


@advice("studies.run check contradiction #2")
def _(w: World) -> None:
    w.fails(*study(w, "grid", "--data", "rows.tsv", "--data", "rows.tsv"))
    w.right(*study(w, "grid", "--data", "rows.tsv"))


@advice("studies.run check missing-value")
def _(w: World) -> None:
    w.fails(command, "grid", "model", "--size", "tiny", "-o", "out")
    w.right(*study(w, "grid", "--data", "rows.tsv"))


@advice("studies.run check contradiction #3")
def _(w: World) -> None:
    w.fails(*study(w, "grid", "--ray", "local"))
    w.right(*study(w, "grid"))


@advice("studies.blocks Blocks.check unknown-name")
def _(w: World) -> None:
    w.fails(*study(w, "blocks", "--kinds", "all+bidirectionl"))
    w.right(*study(w, "blocks", "--kinds", "all+bidirectional"))


@advice("studies.blocks Blocks.check unknown-name #2")
def _(w: World) -> None:
    w.fails(*study(w, "blocks", "--masks", "onw"))
    w.right(*study(w, "blocks", "--masks", "own"))
    w.rows("others.tsv", *w.file("rows.tsv").read_text().splitlines())
    w.right(*study(w, "blocks", "--data", "rows.tsv", "--data", "others.tsv"))


@advice("studies.blocks Blocks.check contradiction")
def _(w: World) -> None:
    lines = w.file("rows.tsv").read_text().splitlines()
    w.rows("more/rows.tsv", *lines)
    w.rows("more/others.tsv", *lines)
    w.fails(*study(w, "blocks", "--data", "rows.tsv", "--data", "more/rows.tsv"))
    w.right(*study(w, "blocks", "--data", "rows.tsv", "--data", "more/others.tsv"))


@advice("studies.blocks Blocks.cells unknown-name")
def _(w: World) -> None:
    w.fails(*study(w, "blocks", "--kinds", "cross"))
    w.right(*study(w, "blocks", "--kinds", "bidirectional"))


@advice("studies.cell_store CellStore.__init__ invalid-value")
def _(w: World) -> None:
    w.rows("file", "")
    w.fails(*study(w, "grid", "-o", "file"))
    w.right(*study(w, "grid", "-o", "folder"))


@advice("studies.cell_store CellStore.__init__ output-exists")
def _(w: World) -> None:
    w.fails(*study(w, "grid", "-o", "model"))
    w.right(*study(w, "grid", "-o", "folder"))


@advice("studies.cell_store _check_stamp run-differs")
def _(w: World) -> None:
    from benchmarks.studies.cell_store import STAMP

    w.rows(f"out/{STAMP}", "no JSON")
    w.fails(*study(w, "grid"))
    w.right(*study(w, "grid", "-o", "folder"))


@advice("studies.cell_store _check_stamp run-differs #2")
def _(w: World) -> None:
    from benchmarks.studies.cell_store import STAMP

    w.rows(f"out/{STAMP}", json.dumps({"kind": "grid"}))
    w.fails(*study(w, "grid"))
    w.right(*study(w, "grid", "-o", "folder"))


@advice("studies.context StudyContext.data missing-value")
def _(w: World) -> None:
    from benchmarks.studies.context import StudyContext

    context: Any = StudyContext.__new__(StudyContext)
    context.rows = None
    rows: Any = StudyContext.data
    w.fails(rows.fget, context)
    w.right(*study(w, "grid", "--data", "rows.tsv"))


@advice("studies.grid Grid.check unknown-name")
def _(w: World) -> None:
    w.fails(*study(w, "grid", "--methods", "dps"))
    w.right(*study(w, "grid", "--methods", "dsp"))


def grid(w: World, name: str, metric: str = "accuracy", model: str | None = None) -> str:
    """The folder of a grid study without cells."""
    from benchmarks.studies.cell_store import STAMP
    from compressor.model_folder import load

    recipe = {"kind": "grid", "metric": metric, "model": model or load(w.model).fingerprint}
    w.rows(f"{name}/{STAMP}", json.dumps(recipe))
    return name


@advice("studies.speed SpeedStudy._grids file-mismatch")
def _(w: World) -> None:
    w.fails(*study(w, "speed", "--grids", grid(w, "first", model="sha256:1")))
    w.right(*study(w, "speed", "--grids", grid(w, "second")))


@advice("studies.speed SpeedStudy._grids contradiction")
def _(w: World) -> None:
    w.fails(*study(w, "speed", "--grids", f"{grid(w, 'first')},{grid(w, 'second', 'f1')}"))
    w.right(*study(w, "speed", "--grids", f"{grid(w, 'first')},{grid(w, 'third')}"))


@advice("studies.speed read_grid file-unreadable")
def _(w: World) -> None:
    w.fails(*study(w, "speed", "--grids", "model"))
    w.right(*study(w, "speed", "--grids", grid(w, "first")))


@advice("studies.penalty constant text")
def _(w: World) -> None:
    w.fails(*study(w, "penalty", "--options", "penalty=1"))
    w.right(*study(w, "penalty", "--penalties", "1"))
