"""The functions of each step. To add a step, write its module and add one line here."""

from __future__ import annotations

from collections.abc import Mapping

from compressor.config.steps import Blocks, Distill, Follow, Heads, Step, Units, Within
from compressor.run.steps import blocks, distill, follow, heads, units, within
from compressor.run.steps.base import StepFunctions

_FUNCTIONS: Mapping[type[Step], StepFunctions] = {
    Follow: follow.FUNCTIONS,
    Heads: heads.FUNCTIONS,
    Blocks: blocks.FUNCTIONS,
    Units: units.FUNCTIONS,
    Distill: distill.FUNCTIONS,
    Within: within.FUNCTIONS,
}


def functions_of(step: Step) -> StepFunctions:
    """What carries a step out."""
    return _FUNCTIONS[type(step)]
