"""A process without PyTorch: packages are hidden that `pip install '.[onnx,serving]'` does not install.

    python -m tests.light_environment COMMANDS.json

runs each command of the file, and prints its exit code and its output as a line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OURS = {"compressor", "graph_passes", "tests"}


def extra(name: str | None = None) -> list[Requirement]:
    """The requirements of an extra of this project, and of extras that it includes; None: of every installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] if name is None else project["optional-dependencies"][name]
    requirements = [Requirement(text) for text in texts]
    included = [each for required in requirements if required.name == project["name"] for each in required.extras]
    further = [requirement for each in included for requirement in extra(each)]
    return [required for required in requirements if required.name != project["name"]] + further


def installed_with(requirements: Sequence[Requirement]) -> set[str]:
    """The distributions that requirements install, with those that they require in turn."""
    installed: set[str] = set()

    def install(requirement: Requirement) -> None:
        extras = ("", *requirement.extras)
        name = canonicalize_name(requirement.name)
        if name in installed and not requirement.extras:
            return
        installed.add(name)
        with contextlib.suppress(PackageNotFoundError):
            for required in map(Requirement, requires(name) or ()):
                marker = required.marker
                if marker is None or any(marker.evaluate({"extra": each}) for each in extras):
                    install(required)

    for requirement in requirements:
        install(requirement)
    return installed


def hidden_packages() -> set[str]:
    """Names of imports that an installation for servers and graphs lacks."""
    kept = installed_with([*extra(), *extra("rows"), *extra("onnx"), *extra("serving"), Requirement("pytest")])
    return {
        package
        for package, distributions in packages_distributions().items()
        if package not in OURS and not any(canonicalize_name(name) in kept for name in distributions)
    }


class Hiding:
    """A finder of modules that does not know some packages."""

    def __init__(self, finder: MetaPathFinder, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> object:
        return getattr(self.finder, name)


def hide(packages: set[str]) -> None:
    """Let imports fail as in an environment without these packages."""
    sys.meta_path[:] = [Hiding(finder, packages) for finder in sys.meta_path]  # type: ignore[arg-type]


def run(commands: dict[str, list[str]]) -> Iterator[dict[str, object]]:
    """The name of each command with its exit code, stdout and stderr. `pytest` runs tests, `import` a name of ours."""
    from compressor.cli import main
    from compressor.measure import timing
    from compressor.targets.onnxruntime import sessions

    # As in the tests of this process.
    timing.ROUNDS, timing.QUIET_SECONDS, sessions.CHOICE_SECONDS = (3, timing.ROUNDS[1]), 0.001, 0.01
    for name, (first, *arguments) in commands.items():
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                if first == "pytest":
                    import pytest

                    code = pytest.main(arguments)
                else:
                    main([first, *arguments])
            except SystemExit as ended:
                code = int(ended.code or 0)
        yield {"name": name, "code": int(code), "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    hide(hidden_packages())
    for result in run(json.loads(Path(sys.argv[1]).read_text())):
        print(json.dumps(result), flush=True)
