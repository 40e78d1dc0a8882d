"""Check that output files can be written, before any work is done."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import ErrorCode, UsageError


def check_output_file(out: Path, *, force: bool, also: tuple[Path, ...] = ()) -> None:
    """Check that a file can be written.

    Args:
        out: the file.
        force: whether an existing file may be replaced.
        also: files that are written with it.

    Raises:
        UsageError: the file is a folder, its folder does not exist, or a file exists and `force` is not set.
    """
    if out.is_dir():
        raise UsageError(f"{out}: is a folder; name the file to write (-o)", code=ErrorCode.INVALID_VALUE, path=out)
    if not out.parent.is_dir():
        raise UsageError(
            f"{out.parent}: no such folder; create it, or write to another file (-o)",
            code=ErrorCode.FILE_MISSING,
            path=out.parent,
        )
    for path in (out, *also):
        if path.exists() and not force:
            raise UsageError(
                f"{path}: exists; add --force to replace it, or write to another file (-o)",
                code=ErrorCode.OUTPUT_EXISTS,
                path=path,
            )
