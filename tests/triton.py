"""A real Triton server on this machine: the one that `nvidia-pytriton` brings, with its Python backend alone.

`make .venv-triton/ready` installs it into an environment of its own. The server listens on free ports of the loopback:

    with triton.Server(repository) as server:
        grpc.InferenceServerClient(server.grpc)   # 127.0.0.1:PORT; server.http for HTTP
        server.restart()                          # on the same ports, with what the repository holds then
        server.kill()                             # as when it crashes
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

ENVIRONMENT = Path(__file__).parent.parent / ".venv-triton"
_STARTS, _STOPS = 120.0, 20.0
"""Seconds that a server may take to be ready, and to end, on a busy machine."""


def missing() -> str | None:
    """Why no server can be started here, or None."""
    if (ENVIRONMENT / "ready").exists():
        return None
    return f"no Triton server is installed; make {ENVIRONMENT.name}/ready"


class Server:
    """A running server; a context that ends it.

    Args:
        repository: folder of models; all are loaded.
        options: more of its own command line, e.g. `--model-control-mode=poll`.

    Attributes:
        repository: folder of models.
        http, grpc: `127.0.0.1:PORT`.
        pid: of the server.
    """

    def __init__(self, repository: Path, *options: str) -> None:
        self.repository = repository
        self._options = options
        self._log = tempfile.NamedTemporaryFile(mode="w+", prefix="triton-", suffix=".log")  # noqa: SIM115
        self._ports = _free_ports(2)
        self.http, self.grpc = (f"127.0.0.1:{port}" for port in self._ports)
        self._shared = f"triton-{os.getpid()}-{self._ports[0]}-"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._log.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server has said since its first start."""
        return Path(self._log.name).read_text(errors="replace")

    def start(self) -> None:
        """Start the server and wait until all models are ready.

        Raises:
            RuntimeError: it ended or did not get ready; the message has the end of its log.
        """
        package = next(ENVIRONMENT.glob("lib/python*/site-packages/pytriton/tritonserver"))
        libraries = (ENVIRONMENT / "ready").read_text().strip()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
            # The backend's stub is the first python3 on the path, and links to the libpython of that one.
            "PATH": f"{ENVIRONMENT / 'bin'}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": libraries,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            str(package / "bin" / "tritonserver"),
            f"--model-repository={self.repository}",
            f"--backend-directory={package / 'backends'}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            f"--http-port={self._ports[0]}",
            f"--grpc-port={self._ports[1]}",
            "--allow-metrics=false",
            "--exit-timeout-secs=1",
            # Shared memory outlives a server that is killed: under a name of its own it can be removed.
            f"--backend-config=python,shm-region-prefix-name={self._shared}",
            *self._options,
        ]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, text=True, env=environment, preexec_fn=_die_with_parent
        )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server as an operator does, or hard where it does not end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOPS)
            except subprocess.TimeoutExpired:
                self.kill()
        for left in Path("/dev/shm").glob(f"{self._shared}*"):
            left.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the server without notice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Stop and start it again on the same ports."""
        self.stop()
        self.start()

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + _STARTS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}:\n{self._faults()}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=2).close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server is not ready after {_STARTS:.0f} s:\n{self._faults()}")

    def _faults(self) -> str:
        """The errors in its log, else the end of it."""
        return "\n".join(line for line in self.log.splitlines() if line.startswith("E")) or self.log[-3000:]


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on: all are held open until the last is found."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def _die_with_parent() -> None:
    """No server outlives the tests, however they end (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
