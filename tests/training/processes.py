"""Learning, training, distilling and collecting maps in one of two processes; `launch` starts this module.

Starting a process takes longer than what is computed here, so that both do everything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from tests.block_masks.collecting_process import collect_together
from tests.selection.learning_process import learn_together
from tests.training.distillation_process import distil_together
from tests.training.process import train_together

PARTS = {
    "learning": learn_together,
    "streams": train_together,
    "distillation": distil_together,
    "maps": collect_together,
}
"""Functions from a folder of their own to a result, by the name of the folder."""


def main(folder: Path) -> None:
    """Run every part, and write the results of this process."""
    results = {name: part(folder / name) for name, part in PARTS.items()}
    state = PartialState()
    (folder / f"rank{state.process_index}.json").write_text(json.dumps(results))
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
