"""The latency gate: is a model on a server, or a graph here, as fast as its baseline, and does it answer right?"""

from compressor.gate.run import Asked, check
from compressor.gate.verdict import Verdict

__all__ = ["Asked", "Verdict", "check"]
