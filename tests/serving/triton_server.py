"""A real Triton server on this machine: the one in `nvidia-pytriton`, which has the Python backend only.

`make .venv-triton/ready` installs it into a separate environment. The server listens on free ports of the loopback:

    with triton_server.Server(repository) as server:
        grpc.InferenceServerClient(server.grpc)   # 127.0.0.1:PORT; server.http for HTTP
        server.restart()                          # on the same ports, with the current content of the repository
        server.kill()                             # a crash
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

ENVIRONMENT = Path(__file__).parents[2] / ".venv-triton"
_START_SECONDS, _STOP_SECONDS = 120.0, 20.0
"""Maximum time until a server is ready, and until it has ended, on a busy machine."""


def missing() -> str | None:
    """Why no server can be started here, or None."""
    if (ENVIRONMENT / "ready").exists():
        return None
    return f"no Triton server is installed; make {ENVIRONMENT.name}/ready"


class Server:
    """A server, running within its context.

    Args:
        repository: folder of models; all are loaded.
        options: further options of its command line, e.g. `--model-control-mode=poll`.

    Attributes:
        repository: folder of models.
        http, grpc: `127.0.0.1:PORT`.
        pid: id of its process.
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
        try:
            self.start()
        except BaseException:
            self._log.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """The server's log since its first start."""
        return Path(self._log.name).read_text(errors="replace")

    def start(self) -> None:
        """Start the server and wait until all models are ready.

        Raises:
            RuntimeError: it ended or did not become ready; the message has the end of its log.
        """
        package = next(ENVIRONMENT.glob("lib/python*/site-packages/pytriton/tritonserver"))
        libraries = (ENVIRONMENT / "ready").read_text().strip()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
            # The backend's stub is the first python3 on the path, linked to the libpython of that one.
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
            # Shared memory outlives a server that is killed; a prefix makes it possible to remove it.
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
        """Ask the server to end, and kill it if it does not."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        for segment in Path("/dev/shm").glob(f"{self._shared}*"):
            segment.unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Stop and start it again on the same ports."""
        self.stop()
        self.start()

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self._process.returncode}:\n{self._log_errors()}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=2).close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server is not ready after {_START_SECONDS:.0f} s:\n{self._log_errors()}")

    def _log_errors(self) -> str:
        """The errors in the log, or its end if there are none."""
        return "\n".join(line for line in self.log.splitlines() if line.startswith("E")) or self.log[-3000:]


def _free_ports(count: int) -> list[int]:
    """Free ports of the loopback; all stay bound until the last is found."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def _die_with_parent() -> None:
    """End the server with the tests, however they end (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
