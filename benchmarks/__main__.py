"""Run three short benchmarks that need no data, one after the other: `python -m benchmarks`, or `make bench`."""

import subprocess
import sys

SCRIPTS = (["benchmarks.speed"], ["benchmarks.apply"], ["benchmarks.hook_overhead"])


def main() -> int:
    """Print each command and its output, and return the exit status of the first one that fails, else 0."""
    for script in SCRIPTS:
        print(f"\n$ python -m {' '.join(script)}", flush=True)
        process = subprocess.run([sys.executable, "-m", *script], check=False)
        if process.returncode:
            return process.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
