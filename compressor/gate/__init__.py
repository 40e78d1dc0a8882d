"""The latency gate: is a model on a server, or a graph here, as fast as its baseline, and does it answer right?"""

from compressor.gate.asked import Asked
from compressor.gate.outcome import Files, gated
from compressor.gate.run import check
from compressor.gate.verdict import Verdict

__all__ = ["Asked", "Files", "Verdict", "check", "gated"]
