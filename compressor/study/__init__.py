"""Studies: many runs of one model side by side, cell by cell, with one table and the papers' figures at the end."""

from compressor.study.base import Asked, Study
from compressor.study.run import KINDS, check, study
from compressor.study.sizes import SIZES, Size

__all__ = ["KINDS", "SIZES", "Asked", "Size", "Study", "check", "study"]
