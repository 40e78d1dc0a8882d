"""Compare the results of the same commands in two checkouts, to prove that a refactoring changes no result.

    python -m tests.equivalence BASE_CHECKOUT CURRENT_CHECKOUT --work FOLDER [--only NAME] [--jobs 2] [--keep]

The results of the base checkout stay in `FOLDER/base-<commit>`, so that later calls run only the current checkout. A
call after an interruption runs only the remaining cases. `renames.py` lists names that the current version may spell
differently.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from tests.equivalence.cases import CASES, Case
from tests.equivalence.checkouts import CaseError, Checkout, open_checkout
from tests.equivalence.compare import differences
from tests.equivalence.runs import prepare_inputs, recipe_faults, run_cases


def main() -> int:
    """Run and compare; return 1 if anything differs, 2 if a checkout cannot be used."""
    options = _options()
    work: Path = options.work.resolve()
    prepare_inputs(work)
    try:
        base, current = open_checkout(options.base, work, "base"), open_checkout(options.current, work, "current")
    except CaseError as error:
        print(error, file=sys.stderr)
        return 2
    cases = [case for case in CASES if not options.only or case.name in options.only]
    failures = {
        role: run_cases(checkout, cases, base, options.jobs)
        for role, checkout in (("base", base), ("current", current))
    }
    equal = sum(_is_equal(case, base, current, failures) for case in cases)
    faults = recipe_faults(current)
    _print_outcome("recipe keys of the base version", faults)
    print(f"{len(cases)} cases: {equal} equal, {len(cases) - equal} different")
    if not current.is_unchanged:
        print(f"{current.path}: was edited during the comparison; run again to compare one version", file=sys.stderr)
    is_equal = equal == len(cases) and not faults
    if is_equal and not options.keep:
        shutil.rmtree(current.results, ignore_errors=True)
    return 0 if is_equal else 1


def _options() -> argparse.Namespace:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(
        prog="python -m tests.equivalence", description="Compare what two versions compute."
    )
    parser.add_argument("base", type=Path, metavar="BASE_CHECKOUT", help="the version that results have to agree with")
    parser.add_argument("current", type=Path, metavar="CURRENT_CHECKOUT", help="the version that is examined")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="holds inputs and results")
    parser.add_argument(
        "--only", action="append", metavar="NAME", choices=names, help=f"{', '.join(names)}; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time [2]")
    parser.add_argument("--keep", action="store_true", help="keep the current version's results though all are equal")
    return parser.parse_args()


def _is_equal(case: Case, base: Checkout, current: Checkout, failures: dict[str, dict[str, str]]) -> bool:
    lines = [f"the {role} version failed: {why[case.name]}" for role, why in failures.items() if case.name in why]
    lines = lines or list(differences(base.results / case.name, current.results / case.name))
    _print_outcome(case.name, lines)
    return not lines


def _print_outcome(name: str, lines: list[str]) -> None:
    print(f"{name}: {'different' if lines else 'equal'}", flush=True)
    for line in lines:
        print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
