"""A version of the project: its folder, its results, and its spelling of the flags of the cases."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.equivalence.renames import ADDED_FLAGS, FLAGS, KINDS

PACKAGES = ("compressor", "graph_passes", "benchmarks")


class CaseError(Exception):
    """A case cannot be run, or a command ended with an unexpected exit code."""


@dataclass(frozen=True)
class Checkout:
    """A version of the project.

    Attributes:
        path: the checkout.
        results: folder of its results, with one folder for each case.
        flags: flags of `compress run` that its help lists.
        kinds: kind of attention in the base version -> name in this version.
    """

    path: Path
    results: Path
    flags: frozenset[str]
    kinds: dict[str, str]

    def command(self, line: str) -> list[str]:
        """The module that runs a command of the base version, and its arguments, with the flags of this version."""
        words = shlex.split(line)
        if words[0] != "train":  # whose flags have kept their names
            words = [self._spelled(word) for word in words]
        if words[0] == "study" and (self.path / "benchmarks" / "studies").is_dir():
            return ["benchmarks.studies", *words[1:]]
        return ["compressor.cli", *words, *(flag for flag in ADDED_FLAGS if words[0] == "run" and flag in self.flags)]

    def _spelled(self, word: str) -> str:
        renamed = FLAGS.get(word, word)  # a flag of an earlier meaning may have the former name
        if word in FLAGS and not {word, renamed} & self.flags:
            raise CaseError(f"{self.path}: knows neither {word} nor {renamed}")
        return renamed if renamed in self.flags else word

    @property
    def is_unchanged(self) -> bool:
        """Whether the source is still the version in the name of the results."""
        return self.results.name.endswith(f"-{_version(self.path)}")


def open_checkout(path: Path, work: Path, role: str) -> Checkout:
    """Describe a checkout, whose results are in `<work>/<role>-<commit>`.

    Raises:
        CaseError: Python imports the package from another folder.
    """
    path = path.resolve()
    imported = python(path, ["-c", "import compressor; print(compressor.__file__)"]).stdout.strip()
    if not Path(imported).is_relative_to(path):
        raise CaseError(f"{path}: Python imports {imported or 'nothing'} in it; give a checkout with the packages")
    pages = (python(path, ["-m", "compressor.cli", "run", flag]).stdout for flag in ("--help-all", "--help"))
    help_text = next(filter(None, pages), "")  # earlier versions have no --help-all
    is_renamed = any(re.search(rf"\b{kind}=", help_text) for kind in KINDS.values() if kind not in KINDS)
    kinds = {kind: new if is_renamed else kind for kind, new in KINDS.items()}
    flags = frozenset(re.findall(r"--[a-z][a-z-]*", help_text))
    return Checkout(path, work / f"{role}-{_version(path)}", flags, kinds)


def _version(path: Path) -> str:
    """Commit of a checkout, with a digest of the packages if they differ from the commit."""
    commit = _git(path, "rev-parse", "--short=12", "HEAD").strip()
    if not _git(path, "status", "--porcelain", "--", *PACKAGES).strip():
        return commit
    digest = hashlib.sha256()
    for source in sorted(file for name in PACKAGES for file in (path / name).rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            digest.update(str(source.relative_to(path)).encode() + source.read_bytes())
    return f"{commit}-{digest.hexdigest()[:12]}"


def _git(path: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(path), *arguments], capture_output=True, text=True, check=True).stdout


def environment(checkout: Path) -> dict[str, str]:
    """Environment variables of a command: one thread and fixed hashes, so that sums and sets have one order."""
    fixed = {"PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return {**os.environ, **fixed, **quiet}


def python(checkout: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python in a checkout."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=environment(checkout), capture_output=True, text=True
    )
