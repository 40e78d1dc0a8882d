"""Ray: reached or started, watched, and ended so that nothing of it stays."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil

from compressor.errors import TargetMissingError

_CONNECTED, _ANSWERED, _ENDED = 5, 20, 2
"""Seconds to reach an address, for a cluster behind it to answer, and for processes to end."""
_SMALLEST_STORE = 80 * 2**20
"""Ray takes no less memory for what processes share."""


def reachable(ray: str) -> None:
    """Raise TargetMissingError where it can be known at once that `connected` would."""
    if not installed():
        raise TargetMissingError(f"ray {ray}: Ray is not installed; pip install 'compressor[distributed]'")
    host, _, port = ray.rpartition(":")
    if _count(ray) is None:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECTED).close()
        except OSError as error:
            raise _no_answer(ray, error.strerror or str(error)) from error


def installed() -> bool:
    """Whether Ray is on this machine; it is not imported."""
    return importlib.util.find_spec("ray") is not None


@contextmanager
def connected(where: str, shared: int) -> Iterator[None]:
    """Ray, connected or on this machine alone; nothing of it stays.

    Args:
        where: `local`, as many workers as this machine has cores; `local:4`; `HOST:PORT` of a cluster that this machine
            is a node of.
        shared: bytes that the workers share.
    """
    count = _count(where)
    quiet: dict[str, Any] = {"logging_level": "critical", "configure_logging": False, "log_to_driver": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    terminates = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    with ExitStack() as stack:
        if count is None:
            _probe(where)
            asked: dict[str, Any] = {"address": where}
        else:
            if "ray" not in sys.modules:  # which reads them once
                # The first, named for other systems, keeps Ray on the loopback device; a token keeps out who else is
                # there.
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
                os.environ.setdefault("RAY_AUTH_MODE", "token")
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            folder = tempfile.TemporaryDirectory(prefix="compress-", ignore_cleanup_errors=True)
            asked = {
                "address": "local",
                "num_cpus": count,
                "include_dashboard": False,
                "object_store_memory": max(_SMALLEST_STORE, 3 * shared),
                "_temp_dir": stack.enter_context(folder),
            }
        import ray
        import ray._private.worker as connection

        # Whatever is logged, Ray tells stdout of workers that died: that is where the result goes.
        prints = connection.print_to_stdstream
        connection.print_to_stdstream = lambda *what, **how: None
        before = _processes()
        try:
            try:
                ray.init(**asked, **quiet)
            except Exception as error:
                raise _no_answer(where, said(error)) from error
            if in_main:  # Ray's own handler ends the process on the spot, and its files would stay
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            yield
        finally:
            started = _processes() - before
            ray.shutdown()
            connection.print_to_stdstream = prints
            # Interrupted while it starts, Ray leaves some of its processes waiting for the others, for a minute.
            for process in psutil.wait_procs(started, timeout=_ENDED)[1]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if in_main:
                signal.signal(signal.SIGTERM, terminates)


def _probe(where: str) -> None:
    """Connect in a process of its own first: Ray may wait for long, or end the process that asks."""
    code = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code, where], capture_output=True, text=True, timeout=_ANSWERED, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _no_answer(where, f"nothing for {_ANSWERED} s") from error
    if tried.returncode:
        raise _no_answer(where, said(tried.stderr))


def _processes() -> set[psutil.Process]:
    """Processes of Ray that descend from this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "ray" in " ".join(process.cmdline()):
                found.add(process)
    return found


def _no_answer(where: str, why: str) -> TargetMissingError:
    if _count(where) is not None:
        return TargetMissingError(f"ray {where}: Ray did not start ({why}); leave --ray out to search without it")
    return TargetMissingError(
        f"ray {where}: no Ray cluster answers there ({why}); start one (ray start --head), let this machine join it, or"
        " say local"
    )


def _count(where: str) -> int | None:
    """Workers asked for on this machine; None: an address."""
    name, _, count = where.partition(":")
    if name != "local":
        return None
    return int(count) if count else len(os.sched_getaffinity(0))


def said(error: object) -> str:
    """The last line of what is often a page."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
