"""Prove the products of a quantized graph on OpenVINO, in a process whose environment chooses the instructions.

Called with the graph and one batch of its inputs (`.npz`); prints whether the proof holds, its error, and the
products that fail.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from compressor.engines.prove import Case, prove_products
from compressor.quantization.matmuls import matmul_names
from compressor.targets import target
from graph_passes import load


def main(graph: Path, inputs: Path) -> None:
    """Print the proof as JSON."""
    out = inputs.with_suffix(".xml")
    proof = prove_products(
        graph,
        lambda products, _: target("openvino").build(products, out, precision="int8", threads=1),
        [Case(dict(np.load(inputs)), "inputs")],
        "compressed",
    )
    failing = matmul_names(load(graph), proof.failing)
    print(json.dumps({"holds": proof.holds, "error": proof.error, "failing": failing}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
