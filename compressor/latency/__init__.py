"""The latency check: is a model as fast as its baseline, and does it compute the right outputs?"""

from compressor.config.check import CheckArtifacts, CheckRequest
from compressor.latency.artifacts import check_and_record
from compressor.latency.check import check
from compressor.latency.verdict import CheckPhase, Outcome, Verdict

__all__ = ["CheckArtifacts", "CheckPhase", "CheckRequest", "Outcome", "Verdict", "check", "check_and_record"]
