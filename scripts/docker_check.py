"""Run the RUN lines of the Dockerfile in a clean folder, stage by stage, with no container engine.

What stands in for a container: one temporary folder a stage, in which `/app` and `/work` lie; COPY takes only what git
tracks; ENV is set; after USER, commands run under that user id where this process may change it and that user may read
the machine's Python (it is said where not). The entry point runs last, with `--help`. Base images and ARG defaults are
left out: the machine's own Python and package index are used.

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
    """One FROM and what follows it, as (instruction, rest of the line)."""

    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    found: dict[str, Stage] = {}
    stage = None
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found[name] = Stage(name, base)
        elif stage:
            stage.lines.append((word, rest.strip()))
    return found


def check(stage: Stage, known: dict[str, Stage], root: Path) -> None:
    """Run one stage, and those it is built on, in `root`."""
    lines = [*(known[stage.base].lines if stage.base in known else []), *stage.lines]
    env = {**os.environ, "HOME": str(root)}
    where, user, entry = root, None, [""]
    for word, rest in lines:
        if word == "WORKDIR":
            where = root / rest.lstrip("/")
            where.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            copy(rest.split(), where)
        elif word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                env[name] = value.replace("/app", str(root / "app")).replace("$PATH", env["PATH"])
        elif word == "USER":
            user = int(rest.split(":")[0])
        elif word == "RUN":
            run(["sh", "-ec", rest], where, env, user)
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
        elif word != "ARG":
            sys.exit(f"docker_check: {word} is not known to this script; teach it what the line does")
    if user is None:
        sys.exit(f"docker_check: {stage.name} ends as root; add a USER line")
    run([*entry, "--help"], where, env, user)


def copy(words: list[str], where: Path) -> None:
    """COPY of tracked files and folders into the working directory."""
    *sources, target = words
    for source in sources:
        listed = subprocess.run(
            ["git", "ls-files", source], cwd=ROOT, check=True, text=True, capture_output=True
        ).stdout
        if not listed:
            sys.exit(f"docker_check: COPY {source}: git tracks no such file")
        for name in listed.splitlines():
            inside = Path(name).relative_to(source) if name != source else Path(Path(name).name)
            path = where / target / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path)


def run(command: list[str], where: Path, env: dict[str, str], user: int | None) -> None:
    """Run one command, under `user` where this process may."""
    print(f"  {shlex.join(command)}", flush=True)
    account = user if user is not None and os.getuid() == 0 and may_enter(sys.base_prefix, user) else None
    if account != user:
        print(f"  (as this user, for {user} cannot be taken here or cannot read {sys.base_prefix})", flush=True)
    path = env["PATH"]
    done = subprocess.run(
        [shutil.which(command[0], path=path) or command[0], *command[1:]], cwd=where, env=env, user=account, text=True
    )
    if done.returncode:
        sys.exit(f"docker_check: exit code {done.returncode}")


def may_enter(folder: str, user: int) -> bool:
    """Whether a user may read a folder; a Python below root's home is for root alone."""
    return (
        subprocess.run(["ls", folder], user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    )


def main() -> None:
    """Check the named stages, or each that no other is built on."""
    known = stages((ROOT / "Dockerfile").read_text())
    bases = {stage.base for stage in known.values()}
    for name in sys.argv[1:] or [name for name in known if name not in bases]:
        print(f"stage {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="docker-check-") as folder:
            Path(folder).chmod(0o755)
            check(known[name], known, Path(folder))
    print("every RUN line ran")


if __name__ == "__main__":
    main()
