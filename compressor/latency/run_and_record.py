"""A check and its files: what comes of it is written, told, and raised where it must not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compressor.config.check import writable
from compressor.errors import ServerError, SlowdownError, UsageError
from compressor.latency import artifacts
from compressor.latency.verdict import Verdict


@dataclass(frozen=True)
class CheckArtifacts:
    """Where checks are kept.

    Attributes:
        junit: JUnit XML of this one.
        history: a line for each.
        plot: picture of the history, `.svg` or `.png`.

    Raises:
        UsageError: one cannot be written.
    """

    junit: Path | None = None
    history: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.plot is not None and self.history is None:
            raise UsageError("--plot: it draws a history; give --history")
        if self.plot is not None and self.plot.suffix.lower() not in (".svg", ".png"):
            raise UsageError(f"--plot {self.plot}: give a name that ends in .svg or .png")
        for file in (self.junit, self.history, self.plot):
            if file is not None:
                writable(file)


def gated(
    files: CheckArtifacts,
    title: str,
    run: Callable[[], Verdict],
    tell: Callable[[Verdict], object] = lambda verdict: None,
) -> Verdict:
    """The verdict of a check that passed; what came of any check is in its files.

    Args:
        title: what is compared, in words.
        run: makes the check.
        tell: hears of the verdict before anything is raised.

    Raises:
        SlowdownError: the model is too slow.
        ServerError: it broke off midway.
        CompressorError, GraphPassError: whatever kept it from being made.
    """
    try:
        if files.history is not None and files.history.exists():
            artifacts.history(files.history)  # nothing is added to a file that is none
        found = run()
    except BaseException as error:
        if files.junit is not None:  # else that of an earlier check would stand for this one
            artifacts.write(files.junit, artifacts.broken(title, error))
        raise
    tell(found)
    if files.junit is not None:
        artifacts.write(files.junit, artifacts.junit(found))
    if files.history is not None:
        artifacts.append(files.history, found)
    if files.plot is not None and files.history is not None:
        artifacts.picture(artifacts.history(files.history), found, files.plot)
    if found.interrupted:
        raise ServerError(f"{found.interrupted} (what was measured until then is told and kept)")
    if found.failures:
        raise SlowdownError("; ".join(found.failures))
    return found
