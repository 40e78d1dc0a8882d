"""The latency gate: is a model on a server, or a graph here, as fast as its baseline, and does it answer right?"""

from compressor.config.check import Asked
from compressor.latency.check import check
from compressor.latency.run_and_record import Files, gated
from compressor.latency.verdict import Verdict

__all__ = ["Asked", "Files", "Verdict", "check", "gated"]
