"""The work folder: one run at a time, nothing half written, what was learned survives."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.errors import InputError, MetricDropError, UsageError
from compressor.workdir import open_workdir


def written(folder: Path, text: str = "new") -> None:
    for name in ("plan.json", "report.json"):
        (folder / name).write_text(text)


def test_finished_work_takes_the_name(tmp_path: Path) -> None:
    with open_workdir(tmp_path / "out", force=False) as work:
        written(work.result)
        (work.result / "report.json").chmod(0o600)
        assert not work.out.exists()
        work.finish()
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # as any new file's
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["plan.json", "report.json"]


def test_force_replaces_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    written(out, "old")
    with open_workdir(out, force=True) as work:
        written(work.result)
        assert (out / "plan.json").read_text() == "old"
        work.finish()
    assert (out / "plan.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_stands_until_it_may_go(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="add --force"), open_workdir(tmp_path / "out", force=False):
        pass
    with pytest.raises(UsageError, match="no run wrote this folder"), open_workdir(tmp_path / "out", force=True):
        pass
    assert (tmp_path / "out" / "letter.txt").read_text() == "dear"


def test_a_stranger_in_the_way_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="no run left it"), open_workdir(tmp_path / "out", force=False):
        pass
    assert (tmp_path / "out.partial" / "letter.txt").read_text() == "dear"


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with open_workdir(tmp_path / "out", force=False), pytest.raises(InputError, match="another run is writing"):  # noqa: SIM117
        with open_workdir(tmp_path / "out", force=False):
            pass


@pytest.mark.parametrize("fault", [ValueError("x"), KeyboardInterrupt(), InputError("x")])
def test_an_error_leaves_nothing(tmp_path: Path, fault: BaseException) -> None:
    with pytest.raises(type(fault)), open_workdir(tmp_path / "out", force=False) as work:  # noqa: PT012
        written(work.result)
        work.learning.mkdir()
        raise fault
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (KeyboardInterrupt(), "interrupted; the same command resumes from"),
        (MetricDropError("too bad"), r"too bad \(the results of learning are kept in"),
    ],
)
def test_what_was_learned_survives_an_error(tmp_path: Path, fault: BaseException, message: str) -> None:
    with pytest.raises(type(fault), match=message), open_workdir(tmp_path / "out", force=False) as work:  # noqa: PT012
        work.learning.mkdir()
        (work.learning / "done.json").write_text("{}")
        raise fault
    assert sorted(path.name for path in (tmp_path / "out.partial").iterdir()) == [".compress", "learning"]


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.onnx.data"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named(tmp_path: Path, fault: Exception) -> None:
    with (
        pytest.raises(InputError, match="the disk is full; free some space"),
        open_workdir(tmp_path / "out", force=False),
    ):
        raise fault
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_ends_the_run_before_its_work(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="GB are free, but the run needs"),
        open_workdir(tmp_path / "o", force=False) as work,
    ):
        work.reserve(1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_the_lock_free_and_the_old_output_whole(tmp_path: Path) -> None:
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


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    aside = tmp_path / ".out.replaced"
    aside.mkdir()
    written(aside, "old")
    with pytest.raises(UsageError, match="add --force"), open_workdir(tmp_path / "out", force=False):
        pass
    assert (tmp_path / "out" / "plan.json").read_text() == "old"
