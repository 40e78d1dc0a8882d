"""The work folder: one run at a time, no partial output, and learned results survive errors; locks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from compressor.errors import ErrorCode, InputError, MetricDropError, UsageError
from compressor.workdir import file_lock, open_workdir, replace_folder
from tests.faults import fails_with


def write_files(folder: Path, text: str = "new") -> None:
    for name in ("plan.json", "report.json"):
        (folder / name).write_text(text)


def test_finished_work_is_renamed_to_the_output_folder(tmp_path: Path) -> None:
    with open_workdir(tmp_path / "out", force=False) as work:
        write_files(work.result)
        (work.result / "report.json").chmod(0o600)
        assert not work.out.exists()
        work.finish()
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # the mode of a new file
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["plan.json", "report.json"]


def test_force_replaces_the_output_only_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_files(out, "old")
    with open_workdir(out, force=True) as work:
        write_files(work.result)
        assert (out / "plan.json").read_text() == "old"
        work.finish()
    assert (out / "plan.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_is_followed_to_the_folder_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    write_files(tmp_path / "real", "old")
    for text in ("first", "second"):
        with open_workdir(tmp_path / "out", force=True) as work:
            write_files(work.result, text)
            work.finish()
        assert (tmp_path / "out" / "plan.json").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real"]


def test_the_rungs_of_a_ladder_are_never_replaced(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "frontier.json").touch()
    with fails_with(ErrorCode.OUTPUT_EXISTS, UsageError, path=tmp_path), open_workdir(tmp_path, force=True):
        pass


def test_a_folder_that_no_run_wrote_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    out = tmp_path / "out"
    for force in (False, True):
        with fails_with(ErrorCode.OUTPUT_EXISTS, UsageError, path=out), open_workdir(out, force=force):
            pass
    assert (tmp_path / "out" / "letter.txt").read_text() == "dear"


def test_an_empty_folder_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with open_workdir(tmp_path / "out", force=False) as work:
        write_files(work.result)
        work.finish()
    assert any((tmp_path / "out").iterdir())


def test_a_path_without_a_name_is_refused() -> None:
    with fails_with(ErrorCode.INVALID_VALUE, UsageError, field="out"), open_workdir(Path("/"), force=True):
        pass


def test_a_partial_folder_that_no_run_wrote_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "letter.txt").write_text("dear")
    partial = tmp_path / "out.partial"
    with fails_with(ErrorCode.OUTPUT_EXISTS, path=partial), open_workdir(tmp_path / "out", force=False):
        pass
    assert (tmp_path / "out.partial" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("name", ["letter.txt/out", f"letter.txt/../{'o' * 250}"])
def test_an_output_folder_that_cannot_be_created_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    out = Path(os.path.normpath(tmp_path / name))
    with pytest.raises(InputError) as error, open_workdir(out, force=False):
        pass
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_UNWRITABLE, out)
    assert ".partial" not in str(error.value)


def test_a_second_run_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    busy = fails_with(ErrorCode.FOLDER_BUSY, path=tmp_path / "out.partial")
    with open_workdir(tmp_path / "out", force=False), busy, open_workdir(tmp_path / "out", force=False):
        pass


@pytest.mark.parametrize("fault", [ValueError("x"), KeyboardInterrupt(), InputError("x")])
def test_an_error_leaves_no_files(tmp_path: Path, fault: BaseException) -> None:
    with pytest.raises(type(fault)), open_workdir(tmp_path / "out", force=False) as work:  # noqa: PT012
        write_files(work.result)
        work.learning.mkdir()
        raise fault
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), MetricDropError("too bad")])
def test_learned_results_survive_an_error(tmp_path: Path, fault: BaseException) -> None:
    kept = re.escape(str(tmp_path / "out.partial"))
    with pytest.raises(type(fault), match=kept), open_workdir(tmp_path / "out", force=False) as work:  # noqa: PT012
        work.learning.mkdir()
        (work.learning / "done.json").write_text("{}")
        raise fault
    assert sorted(path.name for path in (tmp_path / "out.partial").iterdir()) == [".compress", "learning"]
    with pytest.raises(MetricDropError, match="results of an earlier run"), open_workdir(tmp_path / "out", force=False):
        raise MetricDropError("too bad")


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.onnx.data"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named(tmp_path: Path, fault: Exception) -> None:
    full = fails_with(ErrorCode.DISK_FULL, path=tmp_path / "out.partial")
    with full, open_workdir(tmp_path / "out", force=False):
        raise fault
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_space_ends_the_run_before_it_writes(tmp_path: Path) -> None:
    full = fails_with(ErrorCode.DISK_FULL, path=tmp_path / "o.partial")
    with full, open_workdir(tmp_path / "o", force=False) as work:
        work.reserve(1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_releases_its_lock_and_writes_no_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import os, signal, sys; from pathlib import Path; from compressor.workdir import open_workdir\n"
        "with open_workdir(Path(sys.argv[1]), force=False) as work:\n"
        "    (work.result / 'plan.json').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(out)]).returncode == -9
    assert not out.exists()
    with open_workdir(out, force=False) as work:
        assert list(work.result.iterdir()) == []


def test_a_kill_between_the_two_renames_is_repaired(tmp_path: Path) -> None:
    replaced = tmp_path / ".out.replaced"
    replaced.mkdir()
    write_files(replaced, "old")
    out = tmp_path / "out"
    with fails_with(ErrorCode.OUTPUT_EXISTS, UsageError, path=out), open_workdir(out, force=False):
        pass
    assert (tmp_path / "out" / "plan.json").read_text() == "old"


@pytest.mark.parametrize("failing", [False, True])
def test_an_interrupt_between_two_renames_leaves_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    """Another thread may receive the signal, so that blocking it in this one is not enough."""
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
    running = threading.Event()
    thread = threading.Thread(target=running.wait)
    thread.start()
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if failing and path.name == "new":
            raise OSError(errno.EACCES, "denied")
        renamed = rename(path, target)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return renamed

    monkeypatch.setattr(Path, "rename", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of a test runner ignore Ctrl-C
    try:
        with pytest.raises((KeyboardInterrupt, OSError)):
            replace_folder(tmp_path / "new", tmp_path / "out", aside=tmp_path / "aside")
    finally:
        signal.signal(signal.SIGINT, handler)
        running.set()
        thread.join()
    assert (tmp_path / "out" / "text").read_text() == ("out" if failing else "new")


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
        "import pathlib, sys; from compressor.workdir import file_lock\n"
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
