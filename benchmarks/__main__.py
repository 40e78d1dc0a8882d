"""Run every benchmark that needs no data, one after the other: `python -m benchmarks`, or `make bench`."""

import subprocess
import sys

SCRIPTS = (["benchmarks.speed"], ["benchmarks.apply"], ["benchmarks.hook_overhead"])


def main() -> int:
    """Print each command and what it prints; the exit code of the first that fails, else 0."""
    for script in SCRIPTS:
        print(f"\n$ python -m {' '.join(script)}", flush=True)
        done = subprocess.run([sys.executable, "-m", *script], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
