"""The sizes of a study, which `--size` chooses."""

from __future__ import annotations

from compressor.config.study import StudySize

KEEPS = ("83.3%", "50%", "33.3%", "16.7%", "8.3%", "4.2%")
"""60, 36, 24, 12, 6 and 3 heads of 72: the levels of Li et al. 2021, as shares."""


SIZES = {
    "tiny": StudySize("tiny", 256, 64, 128, 2.0, 12, (1,), ("50%", "8.3%"), 2, 32, 5, 2, 0.02, 64),
    "small": StudySize("small", 10_000, 1_000, 5_000, 2.0, 200, (1, 2, 3), KEEPS, 4, 500, 100, 10, 3.0, 200),
    "paper": StudySize("paper", None, None, None, 3.0, None, (1, 2, 3, 4, 5), KEEPS, 12, 10_000, 100, 10, 10.0),
}
"""tiny takes a minute, small at most two hours on two cores; paper is the size of the papers' experiments."""
