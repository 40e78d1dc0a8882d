"""Export and run a folder with sentence-transformers' own backends; runs in the environment of `pins/sentence-exports.txt`.

    python sentence_export.py export MODEL ROWS OUT               # ROWS: a folder with train.csv, of a column `text`
    python sentence_export.py encode MODEL onnx FILE TEXTS.json EMBEDDINGS.npy

`export` writes OUT with int8 graphs for ONNX Runtime (dynamic, for AVX-512 VNNI) and OpenVINO (static, calibrated with
300 of the rows, the number that the library draws by default).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from sentence_transformers import (
    SentenceTransformer,
    export_dynamic_quantized_onnx_model,
    export_static_quantized_openvino_model,
)


def export(model: str, rows: str, out: str) -> None:
    """Write the folder of the model with both int8 graphs."""
    SentenceTransformer(model, backend="onnx").save_pretrained(out)
    export_dynamic_quantized_onnx_model(SentenceTransformer(out, backend="onnx"), "avx512_vnni", out)
    openvino = SentenceTransformer(model, backend="openvino")
    openvino.save_pretrained(out)
    data = {"dataset_name": rows, "dataset_config_name": "default", "dataset_split": "train", "column_name": "text"}
    export_static_quantized_openvino_model(openvino, None, out, **data)


def encode(model: str, backend: str, file: str, texts: str, embeddings: str) -> None:
    """Write the embeddings `[texts, width]` of the texts."""
    encoder = SentenceTransformer(model, backend=backend, model_kwargs={"file_name": file})
    np.save(embeddings, encoder.encode(json.loads(Path(texts).read_text()), convert_to_numpy=True))


if __name__ == "__main__":
    {"export": export, "encode": encode}[sys.argv[1]](*sys.argv[2:])
