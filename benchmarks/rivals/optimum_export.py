"""Export a model folder with optimum-intel, quantized where there are rows; runs in the environment of
`pins/optimum-intel.txt`.

    python optimum_export.py MODEL OVModelForSequenceClassification OUT [ROWS.json]

ROWS.json holds a list of batches, each input -> rows of numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nncf
import numpy as np
import optimum.intel
from optimum.intel import OVConfig, OVQuantizationConfig, OVQuantizer


def main() -> None:
    """Write `openvino_model.xml` and `openvino_model.bin` into the folder OUT."""
    model, model_class, out, *rows_paths = sys.argv[1:]
    network = getattr(optimum.intel, model_class).from_pretrained(model, export=True, compile=False)
    if not rows_paths:
        network.save_pretrained(out)
        return
    rows = [
        {name: np.array(values, dtype=np.int64) for name, values in row.items()}
        for row in json.loads(Path(rows_paths[0]).read_text())
    ]
    config = OVConfig(quantization_config=OVQuantizationConfig(num_samples=len(rows)))
    OVQuantizer.from_pretrained(network).quantize(nncf.Dataset(rows), save_directory=out, ov_config=config)


if __name__ == "__main__":
    main()
