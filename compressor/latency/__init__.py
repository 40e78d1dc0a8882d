"""The latency gate: is a model on a server, or a graph here, as fast as its baseline, and does it answer right?"""

from compressor.config.check import CheckRequest
from compressor.latency.check import check
from compressor.latency.run_and_record import CheckArtifacts, gated
from compressor.latency.verdict import Verdict

__all__ = ["CheckArtifacts", "CheckRequest", "Verdict", "check", "gated"]
