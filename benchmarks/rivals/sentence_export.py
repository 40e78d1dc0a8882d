"""Embed texts with a backend of sentence-transformers, as a folder is or in int8.

    python sentence_export.py onnx MODEL TEXTS.json EMBEDDINGS.npy
    python sentence_export.py openvino MODEL TEXTS.json EMBEDDINGS.npy --int8 OUT --rows ROWS

It runs in the environment of `pins/sentence-onnx.txt` or of `pins/sentence-openvino.txt`: the libraries that the two
backends need exclude each other. With `--int8` the library's own graph in int8 is written into OUT and embeds the
texts: a dynamic one for ONNX Runtime (AVX-512 VNNI), and a static one for OpenVINO, calibrated with rows of the folder
ROWS (`train.csv`, column `text`), as many as the library draws by default.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from sentence_transformers import (
    SentenceTransformer,
    export_dynamic_quantized_onnx_model,
    export_static_quantized_openvino_model,
)

FILES = {"onnx": "model_qint8_avx512_vnni.onnx", "openvino": "openvino_model_qint8_quantized.xml"}


def quantize(backend: str, model: str, rows: str, out: str) -> None:
    """Write the folder of the model with its graph in fp32 and in int8."""
    SentenceTransformer(model, backend=backend).save_pretrained(out)
    whole = SentenceTransformer(out, backend=backend)
    if backend == "onnx":
        export_dynamic_quantized_onnx_model(whole, "avx512_vnni", out)
    else:
        data = {"dataset_name": rows, "dataset_config_name": "default", "dataset_split": "train"}
        export_static_quantized_openvino_model(whole, None, out, column_name="text", **data)


def main() -> None:
    """Write the embeddings of the texts `[texts, width]`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=list(FILES))
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("--int8")
    parser.add_argument("--rows")
    args = parser.parse_args()
    options = {}
    if args.int8:
        quantize(args.backend, args.model, args.rows, args.int8)
        options = {"model_kwargs": {"file_name": FILES[args.backend]}}
    encoder = SentenceTransformer(args.int8 or args.model, backend=args.backend, **options)
    # One text at a time: the scales of dynamic quantization depend on the other texts of a batch and on its padding.
    np.save(args.embeddings, encoder.encode(json.loads(args.texts.read_text()), batch_size=1))


if __name__ == "__main__":
    main()
