"""The interface of a study: its cells, how each is run, and the findings of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from benchmarks.studies.cell_store import Cell, CellStore, Result
from benchmarks.studies.context import StudyContext
from benchmarks.studies.findings import Findings
from benchmarks.studies.request import StudyRequest
from compressor.errors import ErrorCode, UsageError, suggestion
from compressor.progress import ProgressCallback
from compressor.selection.options import heads_to_keep, option_names, pool_of


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


def check_options(
    options: Mapping[str, Any], methods: Sequence[str], reserved: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse an option that none of the methods has, or that the study sets itself.

    Args:
        options: options of the recipe.
        methods: methods that the study compares.
        reserved: option -> reason why it cannot be set, and the remedy.

    Raises:
        UsageError: an option is unknown or reserved.
    """
    known = sorted({name for method in methods for name in option_names(method)})
    for name in options:
        method, dot, option = name.rpartition(".")
        if dot and method not in methods:
            raise UsageError(
                f"option {name!r}: {method} is not studied; {suggestion(method, methods)}",
                code=ErrorCode.UNKNOWN_NAME,
                field=name,
            )
        among = sorted(option_names(method)) if dot else known
        if option not in among:
            raise UsageError(
                f"option {name!r} of {method or ', '.join(methods)}: unknown; {suggestion(option, among)}",
                code=ErrorCode.UNKNOWN_NAME,
                field=name,
            )
        if dot and option == "pool":
            raise UsageError(
                f"option {name!r}: all methods of a study choose from one pool; say pool={options[name]}",
                code=ErrorCode.CONTRADICTION,
                field=name,
            )
        if option in reserved:
            raise UsageError(f"option {name!r}: {reserved[option]}", code=ErrorCode.CONTRADICTION, field=name)
