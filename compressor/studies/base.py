"""What a study is: the cells it is made of, how one is run, and what all of them amount to."""

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
from compressor.selection.ray_cluster import check_reachable
from compressor.studies.cell_store import Cell, StudyFolder
from compressor.studies.context import StudyContext
from compressor.studies.results import Findings
from compressor.tasks.row_files import is_file_name

Result = Mapping[str, Any]
"""What a cell's file holds."""


class Study(ABC):
    """One kind of study.

    Args:
        asked: what for.
        subject: model and rows.
        folder: where the cells lie.
    """

    says: ClassVar[str]
    """What it finds out, in a line."""
    axes: ClassVar[Mapping[str, tuple[Any, ...]]]
    """What can be varied, and its values unless others are asked for; `seeds` and `keeps` come from the size."""
    groups: ClassVar[tuple[str, ...]] = ("Heads",)
    """Groups of the recipe's fields that its results depend on, beside the model, the rows and the seed."""
    several: ClassVar[bool] = False
    """Whether it compares data sets."""
    rows: ClassVar[bool] = True
    """Whether it needs rows."""
    spreads: ClassVar[bool] = False
    """Whether its evaluations are made by `Subject.trials`, which Ray can spread."""

    def __init__(self, request: StudyRequest, context: StudyContext, folder: StudyFolder) -> None:
        self.request, self.context, self.folder = request, context, folder

    @classmethod  # noqa: B027 - some kinds have nothing to refuse
    def check(cls, request: StudyRequest) -> None:
        """Refuse what can be refused before the model and the rows are loaded.

        Raises:
            UsageError: a value of an axis or an option that it does not have.
            InputError: something that it reads is not there.
        """

    @abstractmethod
    def cells(self) -> list[Cell]:
        """Every cell that is asked for, those that others need first."""

    @abstractmethod
    def run(self, cell: Cell, work: Path, tell: ProgressCallback) -> Result:
        """Find out what a cell is there for; the same, whatever ran before in this process."""

    @abstractmethod
    def findings(self, results: Sequence[Result]) -> Findings:
        """What the cells that are done amount to, in whatever order they come."""

    @classmethod
    def values(cls, request: StudyRequest, name: str) -> tuple[Any, ...]:
        """The values of one axis."""
        sized = {"seeds": request.size.seeds, "keeps": request.size.keeps}
        return tuple(request.axes.get(name) or cls.axes[name] or sized.get(name, ()))

    def axis(self, name: str) -> tuple[Any, ...]:
        """The values of one axis of this study."""
        return self.values(self.request, name)

    def settings(self) -> Mapping[str, Any]:
        """Fields of the recipe that it takes other values of than the recipe says, with those: the page tells them."""
        return {}

    def keeps(self) -> list[int]:
        """Heads to keep, as counts among those that a method chooses from, most first."""
        heads = sum(site.heads for site in pool_of(self.context.sites, self.request.recipe.selection.options))
        return sorted({heads_to_keep(keep, heads, "--keeps") for keep in self.axis("keeps")}, reverse=True)


def check_request(kind: str, study: type[Study], request: StudyRequest) -> None:
    """Refuse what this kind of study would not look at, and what is not there.

    Raises:
        UsageError: an axis or a second data set that it does not vary, a value that it does not have, or workers that
            it has no use for.
        InputError: a file of rows, or something else that it reads, is not there.
        TargetMissingError: the workers asked for cannot be had.
    """
    for name in request.axes:
        if name not in study.axes:
            known = ", ".join(map(flag_of, study.axes)) or "nothing"
            raise UsageError(
                f"{flag_of(name)}: study {kind} does not vary it; it varies {known}",
                code=ErrorCode.CONTRADICTION,
                field=name,
            )
    if len(request.sources) > 1 and not study.several:
        raise UsageError(
            f"--data: study {kind} uses one data set, but {len(request.sources)} are set; set one",
            code=ErrorCode.CONTRADICTION,
            field="data",
        )
    if study.rows and not request.recipe.rows.data:
        raise UsageError(f"study {kind}: needs rows; add them (--data)", code=ErrorCode.MISSING_VALUE, field="data")
    for source in dict.fromkeys(
        (*request.sources, request.recipe.rows.data, request.recipe.rows.eval_data, request.recipe.rows.test_data)
    ):
        if source is not None and is_file_name(source) and not Path(source).exists():
            raise InputError(
                f"{source}: no such file of rows; check the path", code=ErrorCode.FILE_MISSING, path=Path(source)
            )
    study.check(request)
    if request.ray is not None and not study.spreads:
        raise UsageError(
            f"--ray {request.ray}: study {kind} has no evaluations to distribute; omit it",
            code=ErrorCode.CONTRADICTION,
            field="ray",
        )
    if request.ray is not None:
        check_reachable(request.ray)
