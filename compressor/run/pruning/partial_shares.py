"""Times of plans that are measured for a cost table, kept until it is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.run.pruning.stored_content import StoredContent
from graph_passes.files import write_text

Share = tuple[float, float]
"""Time of a plan as a share of the whole model's, and its standard error."""


class _Stored(StoredContent):
    """The content of the file: its key, and the share of each plan at each size."""

    key: Mapping[str, str]
    shares: tuple[tuple[Share, ...], ...]


@dataclass(frozen=True)
class PartialShares:
    """A file with the shares of the first plans, from which an interrupted measurement goes on.

    Attributes:
        path: the file.
        key: everything that times depend on; a file with another key is not read.
    """

    path: Path
    key: Mapping[str, str]

    def load(self) -> list[tuple[Share, ...]]:
        """The shares of the first plans, at each size; empty without a file, or if it is damaged or has another key."""
        stored = _Stored.read(self.path, self.key)
        return [] if stored is None else list(stored.shares)

    def store(self, shares: Sequence[tuple[Share, ...]]) -> None:
        """Replace the file; where it cannot be written, an interrupted measurement begins again."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, _Stored(key=self.key, shares=tuple(shares)).model_dump_json())

    def remove(self) -> None:
        """Remove the file, when the table is complete."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
