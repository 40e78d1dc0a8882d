"""Run the RUN lines of the Dockerfile in a clean folder, stage by stage, without a container engine.

A temporary folder per stage replaces the container and holds `/app` and `/work`. COPY copies only files that git
tracks, and ENV is set. After USER, commands run under that user id if this process may change it and that user may
read the machine's Python; otherwise a message says so. The entry point runs last, with `--help`. Base images and ARG
defaults are not used: commands use the machine's own Python and package index.

    python scripts/docker_check.py [STAGE ...]
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Stage:
    """A stage of a Dockerfile: its name, its base, and its lines as (instruction, rest of the line)."""

    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    stage_of: dict[str, Stage] = {}
    stage = None
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stage_of[name] = Stage(name, base)
        elif stage:
            stage.lines.append((word, rest.strip()))
    return stage_of


def check(stage: Stage, stage_of: dict[str, Stage], root: Path) -> None:
    """Run one stage, after the stage that it is built on, in `root`.

    Args:
        stage: the stage.
        stage_of: name -> stage, for all stages of the Dockerfile.
        root: an empty folder.
    """
    lines = [*(stage_of[stage.base].lines if stage.base in stage_of else []), *stage.lines]
    env = {**os.environ, "HOME": str(root)}
    folder, user, entry = root, None, [""]
    for word, rest in lines:
        if word == "WORKDIR":
            folder = root / rest.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            copy(rest.split(), folder)
        elif word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                env[name] = value.replace("/app", str(root / "app")).replace("$PATH", env["PATH"])
        elif word == "USER":
            user = int(rest.split(":")[0])
        elif word == "RUN":
            run(["sh", "-ec", rest], folder, env, user)
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
        elif word != "ARG":
            sys.exit(f"docker_check: this script does not support {word}; extend it")
    if user is None:
        sys.exit(f"docker_check: {stage.name} ends as root; add a USER line")
    run([*entry, "--help"], folder, env, user)


def copy(arguments: list[str], folder: Path) -> None:
    """Copy tracked files and folders into the working directory `folder`, as COPY with these arguments does."""
    *sources, target = arguments
    for source in sources:
        tracked = subprocess.run(
            ["git", "ls-files", source], cwd=ROOT, check=True, text=True, capture_output=True
        ).stdout
        if not tracked:
            sys.exit(f"docker_check: COPY {source}: git tracks no such file")
        for name in tracked.splitlines():
            inside = Path(name).relative_to(source) if name != source else Path(Path(name).name)
            path = folder / target / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path)


def run(command: list[str], folder: Path, env: dict[str, str], user: int | None) -> None:
    """Run one command in a folder, under the user id `user` if this process may use it.

    Args:
        command: the command and its arguments.
        folder: the working directory.
        env: environment variables.
        user: user id; None: the present user.
    """
    print(f"  {shlex.join(command)}", flush=True)
    account = user if user is not None and os.getuid() == 0 and may_enter(sys.base_prefix, user) else None
    if account != user:
        print(f"  (as the present user: user {user} cannot be used here, or cannot read {sys.base_prefix})", flush=True)
    executable = shutil.which(command[0], path=env["PATH"]) or command[0]
    process = subprocess.run([executable, *command[1:]], cwd=folder, env=env, user=account, text=True)
    if process.returncode:
        sys.exit(f"docker_check: exit code {process.returncode}")


def may_enter(folder: str, user: int) -> bool:
    """Whether a user may read a folder; a Python in root's home is readable only for root."""
    return (
        subprocess.run(["ls", folder], user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    )


def main() -> None:
    """Check the named stages, or every stage that no other one is built on."""
    stage_of = stages((ROOT / "Dockerfile").read_text())
    bases = {stage.base for stage in stage_of.values()}
    for name in sys.argv[1:] or [name for name in stage_of if name not in bases]:
        print(f"stage {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="docker-check-") as folder:
            Path(folder).chmod(0o755)
            check(stage_of[name], stage_of, Path(folder))
    print("every RUN line ran")


if __name__ == "__main__":
    main()
