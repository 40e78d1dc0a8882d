"""The timing cache is used again unless it is damaged or from another machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.errors import ErrorCode, InputError
from compressor.targets.tensorrt.builder import TimingCache, open_cache, seal_path
from compressor.targets.tensorrt.metadata import TimingsState
from tests.targets.tensorrt.machines import H200

FINISHED: Any = SimpleNamespace(get_timing_cache=lambda: SimpleNamespace(serialize=lambda: b"times"))
"""TensorRT's configuration after a build."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "timings"


def open_for(path: Path | None, version: str = "10.16") -> TimingCache:
    return open_cache(path, version, H200)


def save(path: Path) -> None:
    cache = open_for(path)
    assert cache.save(FINISHED, cache.use).save_error is None


def test_saved_times_are_used_again(path: Path) -> None:
    assert open_for(path).use.state is TimingsState.NEW
    save(path)
    assert open_for(path).use.state is TimingsState.REUSED
    assert path.read_bytes() == b"times"


def test_times_of_another_machine_are_moved_away(path: Path) -> None:
    save(path)
    use = open_for(path, "11.4").use
    assert (use.state, use.machine) == (TimingsState.OTHER_MACHINE, "TensorRT 10.16 on NVIDIA H200 (SM 9.0)")
    assert not path.exists()


@pytest.mark.parametrize(("content", "state"), [(b"time", TimingsState.DAMAGED), (b"", TimingsState.EMPTY)])
def test_damaged_times_are_moved_away(content: bytes, state: TimingsState, path: Path) -> None:
    save(path)
    path.write_bytes(content)
    assert open_for(path).use.state is state
    assert not path.exists()
    assert path.with_name("timings.unusable").read_bytes() == content


def test_times_of_another_tool_are_used_if_tensorrt_accepts_them(path: Path) -> None:
    save(path)
    path.write_bytes(b"of another tool")
    seal_path(path).unlink()
    cache = open_for(path)
    assert cache.use.state is TimingsState.REUSED
    for accepted, state in ((True, TimingsState.REUSED), (False, TimingsState.REFUSED)):
        config = SimpleNamespace(
            create_timing_cache=lambda data: data, set_timing_cache=lambda times, ignore, accepted=accepted: accepted
        )
        assert cache.apply(config).state is state


def test_times_that_cannot_be_saved_are_reported(path: Path) -> None:
    cache = open_for(path)
    shutil.rmtree(path.parent)
    assert cache.save(FINISHED, cache.use).save_error == "No such file or directory"


def test_a_cache_that_cannot_be_written_is_refused_before_the_build(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "timings", tmp_path):
        with pytest.raises(InputError) as error:
            open_for(path)
        assert error.value.code is ErrorCode.FILE_UNWRITABLE
        assert error.value.details == {"field": "timing_cache", "path": path}


def test_every_gpu_and_version_has_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = {open_for(None, version).path for version in ("8.6.1", "10.16")}
    assert len(paths) == 2
    assert {path.parent for path in paths} == {tmp_path / "compressor"}


def test_messages(path: Path) -> None:
    """The text of reports on a timing cache."""
    use = open_for(path).use
    assert str(use) == ""
    texts = {
        TimingsState.REUSED: f"kernel timings of earlier builds were used ({path})",
        TimingsState.DAMAGED: f"kernels were timed again because {path} was damaged",
        TimingsState.REFUSED: f"kernels were timed again because {path} was refused by TensorRT",
    }
    for state, text in texts.items():
        assert str(use.model_copy(update={"state": state})) == text
    assert str(use.model_copy(update={"save_error": "Disk full"})) == (
        f"kernel timings could not be saved in {path} (Disk full)"
    )
