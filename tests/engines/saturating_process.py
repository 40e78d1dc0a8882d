"""An int8 run for OpenVINO in a process of its own, whose environment chooses the instructions.

Called with the folder of the inputs and the output folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import compressor
from tests.run.runs import learning_recipe


def main(inputs: Path, out: Path) -> None:
    """Run it; the report is in the output folder."""
    compressor.compress(learning_recipe(inputs, out, keep=None, target="openvino", precision="int8"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
