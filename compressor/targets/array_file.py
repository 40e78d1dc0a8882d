"""Read the arrays of an .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name.

    Raises:
        InputError: the file is not an archive of arrays, or holds pickled objects.
    """
    try:
        # np.load would leave the file open where its content is damaged, and returns a bare array for an .npy file.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: not a readable archive of arrays ({one_line(error)}); write it with numpy.savez",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
        ) from error
