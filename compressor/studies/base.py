"""The interface of a study: its cells, how each is run, and the findings of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from compressor.config.fields import flag_of
from compressor.config.study import StudyRequest
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.progress import ProgressCallback
from compressor.selection.pool import heads_to_keep, pool_of
from compressor.selection.ray_search.cluster import check_reachable
from compressor.studies.cell_store import Cell, CellStore
from compressor.studies.context import StudyContext
from compressor.studies.results import Findings
from compressor.tasks.row_files import is_file_name

Result = Mapping[str, Any]
"""The contents of a cell's file: `cell`, `settings`, `seconds`, and what `Study.run` returned."""


class Study(ABC):
    """One kind of study.

    Args:
        request: recipe, size, data sets and axes.
        context: model and rows.
        folder: the folder of the cells.
    """

    description: ClassVar[str]
    """The question that the study answers, in one line."""
    axes: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Axis -> its default values; empty for `seeds` and `keeps`, whose defaults come from the size."""
    groups: ClassVar[tuple[str, ...]] = ("Heads",)
    """Groups of recipe fields that the results depend on, in addition to the model, the rows and the seed."""
    compares_data_sets: ClassVar[bool] = False
    """Whether `--data` may be repeated."""
    needs_rows: ClassVar[bool] = True
    """Whether the study needs rows."""
    uses_ray: ClassVar[bool] = False
    """Whether all evaluations go through `StudyContext.evaluator`, which can distribute them with Ray."""

    def __init__(self, request: StudyRequest, context: StudyContext, folder: CellStore) -> None:
        self.request, self.context, self.folder = request, context, folder

    @classmethod  # noqa: B027 - some kinds have nothing to refuse
    def check(cls, request: StudyRequest) -> None:
        """Refuse a request that is wrong before the model and the rows are loaded.

        Raises:
            UsageError: an unknown value of an axis, or an unknown option.
            InputError: a file that the study reads is missing.
        """

    @abstractmethod
    def cells(self) -> list[Cell]:
        """All cells of the request; a cell comes after the cells that it needs."""

    @abstractmethod
    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        """The result of one cell. It does not depend on the cells that ran before in this process.

        Args:
            cell: the cell.
            work: a folder for intermediate files; after an interruption it holds those of the interrupted run.
            on_progress: receives the progress of the cell.
        """

    @abstractmethod
    def findings(self, results: Sequence[Result]) -> Findings:
        """The findings of the finished cells, which come in any order."""

    @classmethod
    def values(cls, request: StudyRequest, name: str) -> tuple[Any, ...]:
        """The values of one axis."""
        sized = {"seeds": request.size.seeds, "keeps": request.size.keeps}
        return tuple(request.axes.get(name) or cls.axes[name] or sized.get(name, ()))

    def axis(self, name: str) -> tuple[Any, ...]:
        """The values of one axis of this study."""
        return self.values(self.request, name)

    def settings(self) -> Mapping[str, Any]:
        """Fields of the recipe that this study replaces, with the values in use, for the page."""
        return {}

    def keeps(self) -> list[int]:
        """Numbers of heads to keep, among those that a method chooses from, in descending order."""
        heads = sum(site.heads for site in pool_of(self.context.sites, self.request.recipe.selection.options))
        return sorted({heads_to_keep(keep, heads, "--keeps") for keep in self.axis("keeps")}, reverse=True)


def check_request(kind: str, study: type[Study], request: StudyRequest) -> None:
    """Refuse a request that this kind of study would ignore in part, or that names missing files.

    Raises:
        UsageError: an axis or a second data set that the study does not vary, an unknown value, or Ray workers that
            the study does not use.
        InputError: a file of rows, or another file that the study reads, is missing.
        TargetMissingError: the Ray cluster is not reachable.
    """
    for name in request.axes:
        if name not in study.axes:
            known = ", ".join(map(flag_of, study.axes)) or "nothing"
            raise UsageError(
                f"{flag_of(name)}: study {kind} does not vary it; it varies {known}",
                code=ErrorCode.CONTRADICTION,
                field=name,
            )
    if len(request.sources) > 1 and not study.compares_data_sets:
        raise UsageError(
            f"--data: study {kind} uses one data set, but {len(request.sources)} are set; set one",
            code=ErrorCode.CONTRADICTION,
            field="data",
        )
    if study.needs_rows and not request.recipe.rows.data:
        raise UsageError(f"study {kind}: needs rows; add them (--data)", code=ErrorCode.MISSING_VALUE, field="data")
    for source in dict.fromkeys((*request.sources, *request.recipe.rows.sources)):
        if source is not None and is_file_name(source) and not Path(source).exists():
            raise InputError(
                f"{source}: no such file of rows; check the path", code=ErrorCode.FILE_MISSING, path=Path(source)
            )
    study.check(request)
    if request.ray is not None and not study.uses_ray:
        raise UsageError(
            f"--ray {request.ray}: study {kind} has no evaluations to distribute; omit it",
            code=ErrorCode.CONTRADICTION,
            field="ray",
        )
    if request.ray is not None:
        check_reachable(request.ray)
