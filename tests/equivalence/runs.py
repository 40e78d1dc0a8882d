"""Run the cases in a checkout, each command in a separate process; finished cases are not run again."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from compressor.workdir import file_lock
from tests.equivalence import inputs
from tests.equivalence.cases import Case, Step
from tests.equivalence.checkouts import CaseError, Checkout, environment, python
from tests.equivalence.preloaded import Preloaded
from tests.equivalence.renames import FLAGS, recipe_key

RECORD = "case.json"
"""File in the folder of a case that shows that its commands ended as expected; it is written last."""


def prepare_inputs(work: Path) -> None:
    """Write the inputs on the first call, and again if their module has changed."""
    folder, stamp = work / "inputs", work / "inputs" / "stamp"
    work.mkdir(parents=True, exist_ok=True)
    with file_lock(work / ".inputs.lock", create=True):
        if not stamp.is_file() or stamp.read_text() != _inputs_key():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            inputs.write_inputs(folder)
            stamp.write_text(_inputs_key())


def _inputs_key() -> str:
    return hashlib.sha256(Path(inputs.__file__).read_bytes()).hexdigest()


def run_cases(checkout: Checkout, cases: Sequence[Case], base: Checkout, jobs: int) -> dict[str, str]:
    """Run every case that is not done; those that read results of the base checkout come last.

    Returns:
        Name of each case that failed -> why.
    """
    remaining = [case for case in cases if not _is_done(checkout, case)]
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        idle: SimpleQueue[Preloaded] = SimpleQueue()
        for _ in range(min(jobs, len(remaining))):
            idle.put(stack.enter_context(Preloaded(checkout.path, environment(checkout.path))))

        def run(case: Case) -> str:
            process = idle.get()
            try:
                return _run_case(checkout, case, base, process)
            finally:
                idle.put(process)

        for reads_base in (False, True):
            chosen = [case for case in remaining if case.reads_base == reads_base]
            with ThreadPoolExecutor(jobs) as pool:
                failures |= {case.name: why for case, why in zip(chosen, pool.map(run, chosen), strict=True) if why}
    return failures


def _case_key(case: Case) -> str:
    return hashlib.sha256(f"{_inputs_key()} {case}".encode()).hexdigest()


def _is_done(checkout: Checkout, case: Case) -> bool:
    record = checkout.results / case.name / RECORD
    return record.is_file() and json.loads(record.read_text())["key"] == _case_key(case)


def _run_case(checkout: Checkout, case: Case, base: Checkout, process: Preloaded) -> str:
    """The reason why the case failed; empty if every command ended as expected."""
    folder = checkout.results / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folders = {"inputs": checkout.results.parent / "inputs", "out": folder, "base": base.results}
    start = time.perf_counter()
    try:
        for number, step in enumerate(case.steps):
            command = checkout.command(step.line.format(**folders, **checkout.kinds))
            _run_step(process, step, command, folder, number)
    except CaseError as error:
        return str(error)
    seconds = round(time.perf_counter() - start, 1)
    (folder / RECORD).write_text(json.dumps({"key": _case_key(case), "seconds": seconds}))
    print(f"{checkout.results.name}: {case.name} took {seconds} s", file=sys.stderr, flush=True)
    return ""


def _run_step(process: Preloaded, step: Step, command: Sequence[str], folder: Path, number: int) -> None:
    stdout = folder / (step.stdout or f"stdout-{number}.txt")
    stderr = folder / f"stderr-{number}.txt"
    (folder / f"command-{number}.txt").write_text(f"python -m {shlex.join(command)}\n")
    exit_code = process.run(command, stdout, stderr)
    if exit_code != step.exit_code:
        last = (stderr.read_text().strip().splitlines() or ["no message"])[-1]
        raise CaseError(f"exit code {exit_code} instead of {step.exit_code}: {last}")


def recipe_faults(checkout: Checkout) -> list[str]:
    """Renamed recipe keys that are not refused with exit code 2 and a message that names the new key."""
    values = {"--watch-rows": "20", "--blocks": "0.5", "--guarantee": "0.95", "--prune": "{ cross = 0.5 }"}
    checkout.results.mkdir(parents=True, exist_ok=True)
    model, recipe = checkout.results.parent / "inputs" / "bert", checkout.results / "renamed-key.toml"
    faults = []
    for flag, renamed in FLAGS.items():
        if flag in checkout.flags:
            continue
        recipe.write_text(f"{recipe_key(flag)} = {values.get(flag, 'true')}\n")
        process = python(checkout.path, ["-m", "compressor.cli", "run", str(model), "--recipe", str(recipe)])
        message = process.stderr.strip() or "no message"
        if process.returncode != 2 or not re.search(rf"\b{recipe_key(renamed)}\b", message.replace("-", "_")):
            faults.append(f"recipe key {recipe_key(flag)}: exit code {process.returncode}, {message}")
    return faults
