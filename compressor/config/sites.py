"""Fields of `compress sites` besides those of a run's model and export."""

from __future__ import annotations

from compressor.config.fields import config_field
from compressor.config.request import Request
from compressor.config.sections import MEASURING
from compressor.config.values import Count


class SitesOptions(Request):
    """What is counted of each group.

    Raises:
        UsageError: the length is no positive number.
    """

    count: bool = config_field(
        MEASURING, "count parameters and multiply-accumulates, for which the model is exported", True
    )
    seq: Count | None = config_field(
        MEASURING,
        "length in tokens at which multiply-accumulates are counted; default: 128, at most the model's maximum",
    )
