"""Quantize a model folder with optimum-intel; runs in the environment of `pins/optimum-intel.txt`.

    python optimum_int8.py MODEL ROWS.json OVModelForSequenceClassification OUT

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
    """Write `openvino_model.xml` and `openvino_model.bin` into the last folder that is named."""
    model, rows_path, model_class, out = sys.argv[1:]
    rows = [
        {name: np.array(values, dtype=np.int64) for name, values in row.items()}
        for row in json.loads(Path(rows_path).read_text())
    ]
    network = getattr(optimum.intel, model_class).from_pretrained(model, export=True, compile=False)
    config = OVConfig(quantization_config=OVQuantizationConfig(num_samples=len(rows)))
    OVQuantizer.from_pretrained(network).quantize(nncf.Dataset(rows), save_directory=out, ov_config=config)


if __name__ == "__main__":
    main()
