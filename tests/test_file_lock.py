"""Locks on files and folders exclude others until their context ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.file_lock import file_lock


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_lock_excludes_others_until_its_context_ends(is_folder: bool, tmp_path: Path) -> None:
    path = tmp_path if is_folder else tmp_path / "lock"
    with file_lock(tmp_path / "lock", create=True):
        pass
    for error in (None, KeyError):
        with contextlib.suppress(KeyError), file_lock(path):
            with pytest.raises(BlockingIOError), file_lock(path, wait=False):
                pass
            if error is not None:
                raise error
    with file_lock(path, wait=False):
        pass


def test_the_content_of_a_locked_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("content")
    with file_lock(path, create=True):
        assert path.read_text() == "content"


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import pathlib, sys; from compressor.file_lock import file_lock\n"
        "with file_lock(pathlib.Path(sys.argv[1]), create=True): print(flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(BlockingIOError), file_lock(path, wait=False):
            pass
        process.kill()
    with file_lock(path):
        pass


def test_a_path_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    for path, create in ((tmp_path / "missing" / "lock", True), (tmp_path / "missing", False)):
        with pytest.raises(FileNotFoundError), file_lock(path, create=create):
            pass
    assert not (tmp_path / "missing").exists()
