"""Run modules of a checkout with the libraries imported once, which takes longer than most of the commands.

As a program it reads one command per line from its standard input, JSON of a `command`, which is a module and its
arguments, and of files for `stdout` and `stderr`, and writes the exit code. Every command runs in a fork, which imports
the project itself.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    *("accelerate", "datasets", "matplotlib.pyplot", "onnxruntime", "onnxscript.function_libs.torch_lib.ops"),
    *("optimum.exporters.tasks", "pytorch_optimizer", "sacrebleu", "scipy.stats", "sklearn.metrics", "torch._dynamo"),
    *("torch.onnx", "transformers", "transformers.exporters.base", "transformers.activations"),
)
LIMIT_SECONDS = 900


class Preloaded:
    """A Python process in a checkout with its libraries imported.

    Args:
        checkout: the working folder of the process and the first folder on its path.
        environment: its environment variables.

    Raises:
        RuntimeError: the process ended without a response.
    """

    def __init__(self, checkout: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command: Sequence[str], stdout: Path, stderr: Path) -> int:
        """The exit code of one command; negative if a signal ended it, for example after `LIMIT_SECONDS`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"command": list(command), "stdout": str(stdout), "stderr": str(stderr)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        response = self._process.stdout.readline()
        if not response:
            raise RuntimeError("the process that runs the commands has ended; its output says why")
        return int(response)

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def _serve() -> None:
    sys.path[0] = os.getcwd()  # noqa: PTH109  (as under `python -m`)
    for library in LIBRARIES:
        import_module(library)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _run(request)
        print(_exit_code(child), flush=True)


def _run(request: Mapping[str, Any]) -> NoReturn:
    """Run a command and exit at once, because functions that libraries run at exit can hang in a fork."""
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module, *arguments = request["command"]
    sys.argv = [module, *arguments]
    exit_code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _exit_code(child: int) -> int:
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.05)


if __name__ == "__main__":
    _serve()
