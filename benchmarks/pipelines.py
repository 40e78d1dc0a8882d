"""Compare engines in fp32 with what people run in PyTorch, on the same raw rows: text or picture in, answer out.

    python -m benchmarks.pipelines sst2 mnli stsb embeddings reranker entities masks digits

A hundred test rows of each set. The engine is ONNX Runtime's of the whole model; models and rows are those of
`benchmarks.quantization`, `benchmarks.embeddings`, `benchmarks.tokens` (`make .venv/bench`) and `benchmarks.images`,
which are made if they are missing. PyTorch's answers are those of transformers' pipelines, of
`SentenceTransformer.encode` for embeddings and of `CrossEncoder.predict` for a reranker; the engine reads what the
folder's own tokenizer or image processor gives. Printed is the largest difference of a probability, of a score of a
regression, or of a coordinate of an embedding.
transformers 5 has no pipeline for question answering and none for translation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scipy.special import softmax

from benchmarks import images, tokens
from benchmarks.demo import encoder
from benchmarks.machine import machine
from benchmarks.quantization import reference_engine, starting_model
from benchmarks.rivals.tools import import_sentence_transformers
from benchmarks.speed import table
from benchmarks.text_sets import SETS as TEXT_SETS
from benchmarks.text_sets import read_rows, rows_file
from compressor.config.sections import RowsConfig
from compressor.model_folder import ModelFolder, load
from compressor.targets import target
from compressor.targets.base import Engine
from compressor.tasks import open_data
from compressor.tasks.scoring import draw_rows

ROWS = 100
PROPOSALS = 100
"""Tokens that are compared at a mask, the most probable ones."""


def texts_difference(name: str, root: Path) -> float:
    """The largest difference on a set of texts or pairs, classes or a number."""
    folder = root / "quantization" / name
    folder.mkdir(parents=True, exist_ok=True)
    model = load(starting_model(name, folder))
    engine = target("ort").load(reference_engine(model.path, TEXT_SETS[name].max_length, folder))
    classifier = _pipeline("text-classification", model, top_k=None)
    differences = []
    for texts in _test_texts(rows_file(name, folder)):
        logits = _outputs(engine, model, *texts)["logits"][0]
        answers = classifier(dict(zip(("text", "text_pair"), texts, strict=False)))
        scores = {answer["label"]: answer["score"] for answer in answers}
        answered = softmax(logits) if len(logits) > 1 else logits
        differences.append(max(abs(answered[_number(model, label)] - score) for label, score in scores.items()))
    return float(max(differences))


def embeddings_difference(root: Path) -> float:
    """The largest difference of a coordinate of the embedding of a text."""
    folder = root / "embeddings" / "stsb"
    folder.mkdir(parents=True, exist_ok=True)
    import_sentence_transformers(folder)
    from sentence_transformers import SentenceTransformer

    engine = target("ort").load(reference_engine(encoder(), TEXT_SETS["stsb"].max_length, folder))
    texts = [pair[0] for pair in _test_texts(rows_file("stsb", folder))]
    expected = SentenceTransformer(str(encoder()), device="cpu").encode(texts)
    model = load(encoder())
    embeddings = [_outputs(engine, model, text)["sentence_embedding"][0] for text in texts]
    return float(np.abs(np.stack(embeddings) - expected).max())


def reranker_difference(root: Path) -> float:
    """The largest difference of the score of a pair, from a folder that the library saved."""
    folder = root / "quantization" / "stsb"
    folder.mkdir(parents=True, exist_ok=True)
    import_sentence_transformers(folder)
    from sentence_transformers import CrossEncoder

    reranker = CrossEncoder(str(starting_model("stsb", folder)), device="cpu")
    path = folder / "reranker"
    reranker.save_pretrained(str(path))
    engine_folder = folder / "reranker_engine"
    engine_folder.mkdir(exist_ok=True)
    engine = target("ort").load(reference_engine(path, TEXT_SETS["stsb"].max_length, engine_folder))
    model, pairs = load(path), list(_test_texts(rows_file("stsb", folder)))
    expected = reranker.predict(pairs, activation_fn=torch.nn.Identity())
    scores = [_outputs(engine, model, *pair)["logits"][0, 0] for pair in pairs]
    return float(np.abs(np.stack(scores) - expected).max())


def entities_difference(root: Path) -> float:
    """The largest difference of the probability of the tag that the pipeline gives to a token."""
    model, engine, lines = _token_set("entities", root)
    tagger = _pipeline("token-classification", model, ignore_labels=[])
    differences = []
    for block in "".join(lines).strip().split("\n\n")[:ROWS]:
        text = " ".join(line.split("\t")[0] for line in block.split("\n"))
        answers = tagger(text)
        probabilities = softmax(_outputs(engine, model, text)["logits"][0, 1:-1], axis=-1)
        tags = [_number(model, answer["entity"]) for answer in answers]
        scores = probabilities[np.arange(len(tags)), tags]
        differences.append(np.abs(scores - [answer["score"] for answer in answers]).max())
    return float(max(differences))


def masks_difference(root: Path) -> float:
    """The largest difference of the probability of a token at the mask."""
    model, engine, lines = _token_set("masks", root)
    filler = _pipeline("fill-mask", model, top_k=PROPOSALS)
    rng = np.random.default_rng(0)
    differences = []
    for line in lines[:ROWS]:
        words = line.split()
        words[rng.integers(len(words))] = model.processor.mask_token
        text = " ".join(words)
        inputs = model.processor(text, return_tensors="np")
        (position,) = np.flatnonzero(inputs["input_ids"][0] == model.processor.mask_token_id)
        probabilities = softmax(engine.run(dict(inputs))["logits"][0, position])
        answers = filler(text)
        proposed = probabilities[[answer["token"] for answer in answers]]
        differences.append(np.abs(proposed - [answer["score"] for answer in answers]).max())
    return float(max(differences))


def digits_difference(root: Path) -> float:
    """The largest difference of the probability of a class of an image."""
    folder = root / "images"
    folder.mkdir(parents=True, exist_ok=True)
    rows = images.write_digits(folder)
    model = load(images.starting_model(rows, folder))
    engine = target("ort").load(images.reference_engine(model.path, folder))
    data = open_data(RowsConfig(test_data=str(rows)), model)
    classifier = _pipeline("image-classification", model, top_k=len(images.digit_names()))
    differences = []
    for image in draw_rows(data.test, ROWS, seed=0):
        logits = engine.run({"pixel_values": data.task.collate([image])["pixel_values"]})["logits"][0]
        scores = {answer["label"]: answer["score"] for answer in classifier(image["path"])}
        differences.append(np.abs(softmax(logits) - [scores[name] for name in images.digit_names()]).max())
    return float(max(differences))


SETS: dict[str, Callable[[Path], float]] = {
    **{name: partial(texts_difference, name) for name in ("sst2", "cola", "stsb", "mnli")},
    "embeddings": embeddings_difference,
    "reranker": reranker_difference,
    "entities": entities_difference,
    "masks": masks_difference,
    "digits": digits_difference,
}


def _pipeline(task: str, model: ModelFolder, **options: Any) -> Any:
    make_pipeline: Any = transformers.pipeline  # its overloads take no task in a variable, and no model of a folder
    processor = "image_processor" if task == "image-classification" else "tokenizer"
    return make_pipeline(task, model=model.model, device="cpu", **{processor: model.processor}, **options)


def _number(model: ModelFolder, label: str) -> int:
    """The number of a label."""
    numbers: Mapping[str, Any] = model.config.label2id or {}
    return int(numbers[label])


def _outputs(engine: Engine, model: ModelFolder, *texts: str) -> Mapping[str, np.ndarray]:
    """Outputs of the engine for one row of texts."""
    return engine.run(dict(model.processor(*texts, truncation=True, return_tensors="np")))


def _test_texts(path: Path) -> Iterator[list[str]]:
    """The texts of the first test rows of a TSV file."""
    for row in read_rows(path, "test")[:ROWS]:
        yield [text for name, text in row.items() if name not in ("split", "label")]


def _token_set(name: str, root: Path) -> tuple[ModelFolder, Engine, list[str]]:
    """The dense model, its engine and the lines of the test rows of a set of `benchmarks.tokens`."""
    folder = root / "tokens" / name
    model = load(tokens.dense_model(name, folder, tokens.STEPS))
    engine = target("ort").load(reference_engine(model.path, tokens.LENGTH, folder))
    path = folder / "rows" / f"test.{tokens.SETS[name].suffix}"
    return model, engine, path.read_text(encoding="utf-8").splitlines(keepends=True)


def main() -> None:
    """Print the largest difference of each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--out", type=Path, default=Path("build"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'transformers', 'onnxruntime')}", flush=True)
    for name in args.sets:
        print(table([{"set": name, "largest difference": f"{SETS[name](args.out):.1e}"}]), flush=True)


if __name__ == "__main__":
    main()
