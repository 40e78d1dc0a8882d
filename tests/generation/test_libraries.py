"""Libraries of the runtimes load the folder of a decoder, and generate the tokens of the runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import compressor
from compressor.config.run import Recipe
from compressor.generation.deliver import build_plan
from compressor.generation.runner import load_engine
from compressor.generation.workload import Workload
from compressor.pruning.costs import keep_counts
from compressor.targets import cached_target, target
from compressor.targets.caches import GeneratingModel
from tests.generation.counting import tokenizer
from tests.generation.exported import RUNTIMES, exported, whole_graphs
from tests.generation.test_run import SHORT, write_rows
from tests.graph.decoders import copy
from tests.graph.test_decoders import merge

PROMPT, NEW, UNUSED = [5, 17, 42, 8, 60, 33], 32, 98
"""Ids of a prompt, the number of new tokens, and an id that no text has."""
END = 3
"""The id that ends a text of the files."""
FILES = ("config.json", "generation_config.json")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

pytestmark = pytest.mark.usefixtures("shared_exports")


def write_folder(folder: Path, runtime: str, name: str = "gpt2", *, kept: int = 1) -> str | None:
    """Write the folder of a model whose first layer keeps fewer heads; returns what the library cannot do with it."""
    cached, plan, groups = whole_graphs(name)
    pruned = keep_counts(plan, groups, {groups[0].name: kept})
    build_plan(cached, pruned, target(runtime), Workload(((1, 6),), 8), folder, 1)
    contents = []
    for file in FILES:
        content = json.loads((exported(name) / file).read_text())
        contents.append({field: value for field, value in content.items() if field not in TOKENS})
        (folder / file).write_text(json.dumps(contents[-1]))
    generation = dict.fromkeys(TOKENS, UNUSED)
    model = GeneratingModel(contents[0], generation, 64, tokenizer())
    return target(runtime).write_library_files(folder, model)


def tokens_of_runner(folder: Path) -> list[int]:
    """The prompt and the tokens after it, whose choice no end of the text stops."""
    tokens: list[list[int]] = (
        load_engine(folder, threads=1)
        .generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        .tolist()
    )
    assert len(tokens[0]) == len(PROMPT) + NEW
    assert UNUSED not in tokens[0]
    return tokens[0]


def tokens_of_genai(folder: Path, prompt: list[int], length: int) -> list[int]:
    """A prompt and the tokens that onnxruntime-genai chooses after it, of at most a length together."""
    genai = pytest.importorskip("onnxruntime_genai")
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=length)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    return list(generator.get_sequence(0))


@pytest.mark.parametrize("kept", [1, 0])
def test_onnxruntime_genai_generates_the_same_tokens(tmp_path: Path, kept: int) -> None:
    pytest.importorskip("onnxruntime_genai")
    assert write_folder(tmp_path, "ort", kept=kept) is None
    expected = tokens_of_runner(tmp_path)
    assert tokens_of_genai(tmp_path, PROMPT, len(expected)) == expected


@pytest.mark.parametrize("form", ["gpt2", "gpt2, merged", "qwen3"])
def test_onnxruntime_genai_generates_the_same_tokens_with_rounded_weights_of_a_file(tmp_path: Path, form: str) -> None:
    """The file is that of another exporter, with the names of Optimum, also where it has two graphs."""
    pytest.importorskip("onnxruntime_genai")
    name, _, merged = form.partition(", ")
    file, prompt = copy(name, tmp_path / "model"), [5, 17, 8, 21]
    if merged:
        graph = onnx.load(file)
        merge(graph.graph)
        onnx.save(graph, file)
    rounded: dict[str, Any] = {"precision": "int4w", "max_drop": 1e3, "macs": "80%"}
    recipe = Recipe(model=file, data=str(write_rows(tmp_path)), out=tmp_path / "out", **rounded, **SHORT)
    report = compressor.compress(recipe)
    assert report.generation is not None
    assert report.generation.precision == "int4w"
    runner = load_engine(tmp_path / "out", provider="cpu", threads=1)
    (expected,) = runner.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0).tolist()
    assert len(expected) > len(prompt)
    # The library leaves out the token that ends a text.
    assert tokens_of_genai(tmp_path / "out", prompt, len(expected)) == [token for token in expected if token != END]


@pytest.mark.parametrize("kept", [1, 0])
def test_openvino_genai_generates_the_same_tokens(tmp_path: Path, kept: int) -> None:
    genai = pytest.importorskip("openvino_genai")
    pytest.importorskip("openvino_tokenizers")
    import openvino

    assert write_folder(tmp_path, "openvino", kept=kept) is None
    expected = tokens_of_runner(tmp_path)
    pipeline = genai.LLMPipeline(tmp_path, "CPU", INFERENCE_PRECISION_HINT="f32")
    ids = torch.tensor([PROMPT]).numpy()
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(ids * 0 + 1))
    result = pipeline.generate(inputs, genai.GenerationConfig(max_new_tokens=NEW, ignore_eos=True))
    assert list(result.tokens[0]) == expected[len(PROMPT) :]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_libraries_do_not_run_encoder_decoders(tmp_path: Path, runtime: str) -> None:
    assert write_folder(tmp_path, runtime, "t5") is not None
    assert not [*tmp_path.glob("genai_config.json"), *tmp_path.glob("openvino_tokenizer.xml")]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_folder_names_the_runtime_of_its_engines(tmp_path: Path, runtime: str) -> None:
    write_folder(tmp_path, runtime)
    assert cached_target(tmp_path) is target(runtime)
