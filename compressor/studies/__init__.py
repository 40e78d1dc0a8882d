"""Studies: many runs of one model side by side, cell by cell, with one table and the papers' figures at the end."""

from compressor.config.study import StudyRequest, StudySize
from compressor.studies.base import Study
from compressor.studies.presets import SIZES
from compressor.studies.run import KINDS, check, study

__all__ = ["KINDS", "SIZES", "Study", "StudyRequest", "StudySize", "check", "study"]
