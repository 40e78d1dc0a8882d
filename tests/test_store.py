"""Results are computed once, appear whole or not at all, and go on from unfinished work."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import ErrorCode, InputError
from compressor.store import File, Files, Json, Store, begin, begun_key, digest, version_of, versioned
from tests.faults import fails_with

NUMBER: Files[int] = Json(int)


def counter(version: int = 1) -> tuple[Callable[[Path], int], list[Path]]:
    """A computation of a version that returns the number of its calls, and the folders that it got."""
    works = list[Path]()

    @versioned(version)
    def compute(work: Path) -> int:
        works.append(work)
        return len(works)

    return compute, works


def test_a_result_is_computed_once_for_each_input(tmp_path: Path) -> None:
    store, (compute, works) = Store(tmp_path / "store"), counter()
    assert [store.memo("a", {"seed": 1}, compute, NUMBER) for _ in range(3)] == [1, 1, 1]
    assert store.holds("a", {"seed": 1}, compute)
    assert store.memo("b", {"seed": 1}, compute, NUMBER) == 2
    assert store.memo("a", {"seed": 2}, compute, NUMBER) == 3
    assert not store.holds("a", {"seed": 1}, compute)
    assert (store.load("a", NUMBER), store.load("b", NUMBER), store.load("c", NUMBER)) == (3, 2, None)
    assert sorted(path.name for path in store.path.iterdir()) == ["a", "b"]
    assert not any(work.exists() for work in works)


def test_inputs_of_the_store_and_versions_of_the_code_are_part_of_the_key(tmp_path: Path) -> None:
    store, (compute, _), (changed, _) = Store(tmp_path, {"model": 1}), counter(), counter(2)
    store.memo("a", {}, compute, NUMBER)
    assert not store.holds("a", {}, changed)
    assert not replace(store, inputs={"model": 2}).holds("a", {}, compute)
    assert store.holds("a", {"model": 1}, compute)


def test_code_without_a_version_has_that_of_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(TypeError, match="versioned"):
        store.memo("a", {}, lambda _: 1, NUMBER)
    assert replace(store, version=3).memo("a", {}, lambda _: 1, NUMBER) == 1
    assert not replace(store, version=4).holds("a", {}, lambda _: 1)
    assert version_of(lambda _: 1) is None


def test_an_interrupted_computation_goes_on_from_its_unfinished_work(tmp_path: Path) -> None:
    store = Store(tmp_path)

    @versioned(1)
    def compute(work: Path) -> int:
        part = store.within(work).memo("part", {}, first, NUMBER)
        if not (work / "file").exists():
            (work / "file").touch()
            raise KeyboardInterrupt
        return part

    first, parts = counter()
    with pytest.raises(KeyboardInterrupt):
        store.memo("a", {"seed": 1}, compute, NUMBER)
    assert store.load("a", NUMBER) is None
    assert store.memo("a", {"seed": 1}, compute, NUMBER) == 1
    assert len(parts) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_unfinished_work_from_other_inputs_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)

    @versioned(1)
    def compute(work: Path) -> int:
        (work / "file").touch(exist_ok=False)
        raise KeyboardInterrupt

    for seed in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            store.memo("a", {"seed": seed}, compute, NUMBER)
    with pytest.raises(FileExistsError):
        store.memo("a", {"seed": 2}, compute, NUMBER)


def test_a_damaged_result_is_computed_again(tmp_path: Path) -> None:
    store, (compute, _) = Store(tmp_path), counter()
    for number, name in enumerate(("result.json", "done.json"), 2):
        store.memo("a", {}, compute, NUMBER)
        (tmp_path / "a" / name).write_text("{")
        assert store.memo("a", {}, compute, NUMBER) == number


def test_a_result_that_no_longer_holds_is_computed_again(tmp_path: Path) -> None:
    store, (compute, _) = Store(tmp_path), counter()
    results = [store.memo("a", {}, compute, NUMBER, accept=lambda number: number > 1) for _ in range(3)]
    assert results == [1, 2, 2]


def test_results_come_back_as_they_were_computed(tmp_path: Path) -> None:
    store = Store(tmp_path, version=1)
    numbers: Files[tuple[float, dict[int, float]]] = Json(tuple[float, dict[int, float]])
    expected = (0.1 + 0.2, {8: math.inf, 16: -1e-300})
    store.memo("numbers", {}, lambda _: expected, numbers)
    assert store.memo("numbers", {}, lambda _: expected, numbers) == expected
    undefined = store.memo("nan", {}, lambda _: (math.nan, {}), numbers)
    assert math.isnan(undefined[0])
    assert math.isnan((store.load("nan", numbers) or undefined)[0])
    text = File[str]("file.txt", lambda result, path: path.write_text(result), Path.read_text)
    assert [store.memo("text", {}, lambda _: "a", text), store.load("text", text)] == ["a", "a"]


class FailingFiles(Json[int]):
    """Writes a part of a result, and fails."""

    def __init__(self, error: int) -> None:
        super().__init__(int)
        self.error = error

    def save(self, result: int, folder: Path) -> None:
        super().save(result, folder)
        raise OSError(self.error, "failed", "file")


@pytest.mark.parametrize(
    ("error", "code"), [(errno.ENOSPC, ErrorCode.DISK_FULL), (errno.EACCES, ErrorCode.FILE_UNWRITABLE)]
)
def test_a_result_that_cannot_be_written_leaves_the_unfinished_work(
    error: int, code: ErrorCode, tmp_path: Path
) -> None:
    store = Store(tmp_path, version=1)

    def compute(work: Path) -> int:
        (work / "file").touch()
        return 1

    with fails_with(code, InputError, path=tmp_path / "a"):
        store.memo("a", {}, compute, FailingFiles(error))
    assert not (tmp_path / "a").exists()
    assert (store.unfinished("a") / "file").exists()
    errors = list[OSError]()
    assert store.memo("a", {}, compute, FailingFiles(error), on_unwritable=errors.append) == 1
    assert [caught.errno for caught in errors] == [error]


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store, (compute, works) = Store(tmp_path / "file"), counter()
    with fails_with(ErrorCode.FILE_UNWRITABLE, InputError) as caught:
        store.memo("a", {}, compute, NUMBER)
    assert "\n" not in str(caught.value)
    errors = list[OSError]()
    assert store.memo("a", {}, compute, NUMBER, on_unwritable=errors.append) == 1
    assert len(errors) == 1
    assert not works[0].exists()


def test_two_runs_may_compute_the_same_at_the_same_time(tmp_path: Path) -> None:
    store = Store(tmp_path, is_shared=True)
    works = list[Path]()

    @versioned(1)
    def compute(work: Path) -> int:
        works.append(work)
        return 1 if len(works) > 1 else store.memo("a", {}, compute, NUMBER)

    assert store.memo("a", {}, compute, NUMBER) == 1
    assert len({*works}) == 2
    assert store.holds("a", {}, compute)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.lock", "a"]


def test_a_result_that_grows_is_locked_and_stays(tmp_path: Path) -> None:
    store, (compute, _) = Store(tmp_path, is_shared=True), counter()
    with store.growing("a", compute) as folder:
        (folder / "rows").touch()
        with pytest.raises(BlockingIOError), store.growing("a", compute):
            pass
    with store.growing("a", compute) as folder:
        assert (folder / "rows").exists()
    with Store(tmp_path, {"teacher": 2}).growing("a", compute) as folder:
        assert not (folder / "rows").exists()


def test_results_are_listed_from_the_newest(tmp_path: Path) -> None:
    store = Store(tmp_path, version=1)
    for number in range(3):
        store.memo(f"a-{number}", {"number": number}, lambda _: 1, NUMBER)
    store.memo("b", {}, lambda _: 1, NUMBER)
    listed = store.stored("a-*")
    assert {stored.inputs["number"] for stored in listed} == {0, 1, 2}
    assert {stored.folder.name for stored in listed} == {"a-0", "a-1", "a-2"}


class Process:
    """One of several processes, which are threads here."""

    def __init__(self, number: int, barrier: threading.Barrier) -> None:
        self.is_main_process, self._barrier = number == 0, barrier

    def wait_for_everyone(self) -> None:
        self._barrier.wait(timeout=20)


@pytest.mark.parametrize("by_main", [False, True])
def test_several_processes_write_into_one_folder_of_unfinished_work(by_main: bool, tmp_path: Path) -> None:
    barrier, results, writers = threading.Barrier(3), list[int](), list[int]()

    def take_part(number: int) -> None:
        store = Store(tmp_path, version=1, processes=Process(number, barrier))

        def compute(work: Path) -> int:
            (work / str(number)).touch()
            writers.append(number)
            return 7

        results.extend(store.memo("a", {}, compute, NUMBER, by_main=by_main) for _ in range(2))

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [7] * 6
    assert sorted(writers) == ([0] if by_main else [0, 1, 2])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_work_is_begun_under_a_key(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    assert begun_key(folder) is None
    begin(folder, {"seed": 1})
    (folder / "file").touch()
    begin(folder, {"seed": 1})
    assert (begun_key(folder), (folder / "file").exists()) == ({"seed": 1}, True)
    begin(folder, {"seed": 2})
    assert not (folder / "file").exists()


def test_a_share_without_locks_is_used_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("compressor.store.file_lock", refuse)
    compute, works = counter()
    store = Store(tmp_path, is_shared=True)
    assert store.memo("a", {}, compute, NUMBER) == 1
    assert works == [store.unfinished("a")]


def test_digests_do_not_depend_on_the_order_of_names() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
