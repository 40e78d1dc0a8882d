"""Tiny model folders, rows, plans and a graph, drawn with fixed seeds by transformers, torch and numpy only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

BERT_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT_WORDS = "good bad film plot the a very not at all who what paris rome river tower city by stands tall".split()
NUMBERS = "one two three four five six seven eight nine ten".split()
PAIR_MARKS = ("<pad>", "</s>", "<unk>")
GERMAN = "ein zwei hund katze haus rot blau gross".split()
ENGLISH = "one two dog cat house red blue big".split()
QUESTION_WORDS = "paris rome river tall the tower who city by stands".split()
BERT_SITE = "bert.encoder.layer.{}.attention.self"
ENDS: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3}
TRAINING_STEPS = 120
LONG = 512
"""Tokens of the longest row: at this length block-sparse attention is faster than a mask on every machine."""


def write_inputs(folder: Path) -> None:
    """Write every input of the cases into an empty folder."""
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    _write_models(folder)
    _write_rows(folder)
    _train_classifier(folder / "bert", folder / "reviews-train.tsv")
    _write_plans(folder / "plans")
    _write_recipes(folder / "recipes")
    _export_graph(folder / "bert", folder / "bert.onnx")


def _write_models(folder: Path) -> None:
    marked = _bert_tokenizer()
    _save(hf.BertForSequenceClassification(_bert_config(len(marked))), marked, folder / "bert", seed=1)
    _save(hf.BertForQuestionAnswering(_bert_config(len(marked))), marked, folder / "bert-qa", seed=2)
    longer: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": LONG}
    _save(hf.BertForSequenceClassification(_bert_config(len(marked), **longer)), marked, folder / "bert-long", seed=3)
    _save(hf.GPT2LMHeadModel(_gpt2_config(len(marked), 2, 40)), marked, folder / "gpt2", seed=4)
    _save(hf.GPT2LMHeadModel(_gpt2_config(len(marked), 1, LONG)), marked, folder / "gpt2-long", seed=5)
    llama = hf.LlamaConfig(**_sizes(len(marked)), num_key_value_heads=2, **ENDS)
    _save(hf.LlamaForCausalLM(llama), marked, folder / "llama", seed=6)
    paired = _pair_tokenizer()
    start: dict[str, Any] = {"decoder_start_token_id": 0}
    t5 = hf.T5Config(vocab_size=len(paired), d_model=16, d_kv=8, d_ff=20, num_layers=1, num_heads=4, **start)
    _save(hf.T5ForConditionalGeneration(t5), paired, folder / "t5", seed=7)
    _save(hf.MarianMTModel(_marian_config(len(paired))), paired, folder / "marian", seed=8)


def _sizes(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 20,
        "max_position_embeddings": 40,
    }


def _bert_config(vocabulary: int, **sizes: int) -> hf.BertConfig:
    return hf.BertConfig(**{**_sizes(vocabulary), **sizes})


def _gpt2_config(vocabulary: int, layers: int, positions: int) -> hf.GPT2Config:
    return hf.GPT2Config(vocab_size=vocabulary, n_embd=16, n_layer=layers, n_head=4, n_positions=positions, **ENDS)


def _marian_config(vocabulary: int) -> hf.MarianConfig:
    return hf.MarianConfig(
        vocab_size=vocabulary,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        max_position_embeddings=24,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        decoder_start_token_id=0,
        forced_eos_token_id=1,
    )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int) -> None:
    """Save the model with weights that are large enough for every head to change the output."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train_classifier(folder: Path, rows: Path) -> None:
    """Train until the outputs depend on the heads; otherwise searches among the heads would prove nothing."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    cells = [line.split("\t") for line in rows.read_text(encoding="utf-8").splitlines()[1:]]
    batch = tokenizer([text for _, _, text in cells], padding=True, return_tensors="pt")
    labels = torch.tensor([int(label) for label, _, _ in cells])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(0)
    model.train()
    for _ in range(TRAINING_STEPS):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _bert_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words separated by spaces, with the special tokens of BERT around one or two texts."""
    backend = _word_level((*BERT_MARKS, *BERT_WORDS, *NUMBERS), "[UNK]")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _pair_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words of both languages separated by spaces, with an end token after every text."""
    backend = _word_level((*PAIR_MARKS, *GERMAN, *ENGLISH), "<unk>")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_input_names=names
    )


def _word_level(words: Sequence[str], unknown: str) -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _write_rows(folder: Path) -> None:
    for split, count, seed in (("train", 96, 0), ("eval", 64, 1), ("test", 48, 2)):
        draw = np.random.default_rng(seed)
        _write_lines(folder / f"reviews-{split}.tsv", ["label\tdomain\ttext", *(_review(draw) for _ in range(count))])
        _write_lines(folder / f"pairs-{split}.tsv", ["de\ten", *(_pair(draw) for _ in range(count // 3))])
        _write_lines(folder / f"questions-{split}.jsonl", [_question(draw, row) for row in range(count // 3)])
        _write_lines(folder / f"counting-{split}.txt", [_counting(draw, 3, 20) for _ in range(count)])
    draw = np.random.default_rng(3)
    texts = [_counting(draw, LONG - 40, LONG - 2) for _ in range(8)]
    _write_lines(folder / "long.txt", texts)
    _write_lines(folder / "long.tsv", ["label\ttext", *(f"{row % 2}\t{text}" for row, text in enumerate(texts))])


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _review(draw: np.random.Generator) -> str:
    """A row of 3 to 26 words whose label says whether `good` is more frequent than `bad`."""
    words = draw.choice([*BERT_WORDS[:10], "good", "bad"], size=int(draw.integers(3, 27))).tolist()
    label = int(words.count("good") > words.count("bad"))
    return f"{label}\t{draw.choice(['cinema', 'books'])}\t{' '.join(words)}"


def _pair(draw: np.random.Generator) -> str:
    words = draw.integers(0, len(GERMAN), int(draw.integers(1, 8)))
    return f"{' '.join(GERMAN[word] for word in words)}\t{' '.join(ENGLISH[word] for word in words)}"


def _question(draw: np.random.Generator, row: int) -> str:
    """A question whose answer is a word of its context."""
    words = draw.choice(QUESTION_WORDS, size=int(draw.integers(6, 22))).tolist()
    answer = int(draw.integers(len(words)))
    start = sum(len(word) + 1 for word in words[:answer])
    answers = {"text": [words[answer]], "answer_start": [start]}
    return json.dumps({"id": str(row), "question": "who what", "context": " ".join(words), "answers": answers})


def _counting(draw: np.random.Generator, shortest: int, longest: int) -> str:
    """A line of numbers, each of which is likely to be followed by the next one."""
    number, words = int(draw.integers(10)), []
    for _ in range(int(draw.integers(shortest, longest + 1))):
        words.append(NUMBERS[number])
        number = (number + 1) % 10 if draw.random() < 0.8 else int(draw.integers(10))
    return " ".join(words)


def _write_plans(folder: Path) -> None:
    """Write plans with the names of both versions."""
    folder.mkdir()
    bert = [
        _site(BERT_SITE.format(0), "bidirectional", (0, 2), (1.0, 0.5)),
        _site(BERT_SITE.format(1), "bidirectional", (1,)),
    ]
    llama = [
        _site("model.layers.0.self_attn", "causal", (2, 3), kv_heads=2),
        _site("model.layers.1.self_attn", "causal", (), kv_heads=2),
    ]
    for name, sites in (("bert", bert), ("llama", llama)):
        plan = {"version": 1, "method": "written by hand", "options": {}, "seed": 3, "sites": sites}
        (folder / f"{name}.json").write_text(json.dumps(plan, indent=1))


def _site(
    name: str, kind: str, kept: Sequence[int], scale: Sequence[float] = (), kv_heads: int = 4
) -> dict[str, object]:
    scales = list(scale) or [1.0] * len(kept)
    sizes = {"heads": 4, "kv_heads": kv_heads, "head_dim": 4}
    return {"name": name, "kind": kind, **sizes, "kept": list(kept), "scale": scales, "mask": None}


def _write_recipes(folder: Path) -> None:
    """Write a recipe whose keys all versions know."""
    folder.mkdir()
    lines = [
        *('model = "../bert"', 'data = "../reviews-train.tsv"', 'eval_data = "../reviews-eval.tsv"'),
        *('test-data = "../reviews-test.tsv"', 'method = "ste"', 'keep = "50%"', "steps = 6", "batch_size = 8"),
        *("max_length = 28", "learning_rate = 1e-3", "seed = 5", "batch = [1]", "seq = [8]", "seconds = 0.1"),
        *("threads = 1", "options = { gate_learning_rate = 0.3, evaluations = 2 }"),
    ]
    _write_lines(folder / "compress.toml", lines)


def _export_graph(folder: Path, path: Path) -> None:
    """Export the classifier by torch, without gates."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.arange(2 * 7).reshape(2, 7) % 20 + 5
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=40)}
    sample = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    torch.onnx.export(
        model, (), str(path), kwargs=sample, dynamo=True, dynamic_shapes=dict.fromkeys(sample, axes), verbose=False
    )
