"""Advice of `model_folder`: see `tests.advice.world`."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers as hf

from tests import folders, rerankers
from tests.advice.world import World, advice


def change_config(w: World, **fields: Any) -> None:
    """Change the configuration of the model; a value None removes the key."""
    file = w.file("model/config.json")
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@advice("model_folder.feeds cannot_make unsupported-model")
def _(w: World) -> None:
    module = importlib.import_module("compressor.model_folder.examples")
    w.patch.setattr(module, "_required", lambda parameters: {"input_ids", "positions"})
    np.savez(w.file("inputs.npz"), input_ids=np.ones((2, 8), np.int64), attention_mask=np.ones((2, 8), np.int64))
    w.fails(*w.keep_one())
    w.right(*w.keep_one("--inputs", "inputs.npz"))


@advice("model_folder.feeds vocabulary_size unsupported-model")
def _(w: World) -> None:
    from compressor.model_folder.feeds import vocabulary_size

    config = hf.ViTConfig()
    with w.patch.context() as patch:
        patch.setattr("compressor.model_folder.feeds.access_of", lambda model: SimpleNamespace(table_size=None))
        w.fails(vocabulary_size, config, None)
    np.savez(w.file("inputs.npz"), input_ids=np.ones((2, 8), np.int64), attention_mask=np.ones((2, 8), np.int64))
    w.right(*w.keep_one("--inputs", "inputs.npz"))


@advice("model_folder.feeds text_feeds out-of-range")
def _(w: World) -> None:
    command = ("model", "--plan", "plan.json", "-o", "out", "--seq")
    w.fails(*command, "64")
    w.right(*command, "20")


@advice("model_folder.loading _find_parts unsafe-code")
def _(w: World) -> None:
    change_config(w, auto_map={"AutoModelForSequenceClassification": "modeling.Mine"})
    w.rows("model/modeling.py", "from transformers import BertForSequenceClassification as Mine")
    w.fails(*w.keep_one())
    w.right(*w.keep_one("--trust-remote-code"))


@advice("model_folder.network _missing_error text #2")
def _(w: World) -> None:
    w.patch.setattr("compressor.model_folder.network._fitting_class", lambda config, names: None)
    folders.save(folders.bert_encoder(), w.file("encoder"))
    w.fails("encoder", "--task", "text-classification", "--plan", "plan.json", "-o", "out")
    w.right("encoder", "--task", "feature-extraction", "-o", "out")
    w.right("model", "--task", "text-classification", "--plan", "plan.json", "-o", "out")


@advice("model_folder.model_class model_class unsupported-model")
def _(w: World) -> None:
    folders.save(hf.BertForPreTraining(hf.BertConfig(**folders.SIZES)), w.file("pretrained"))
    w.fails("pretrained", "-o", "out")
    w.right("pretrained", "--task", "fill-mask", "-o", "out")


@advice("model_folder.model_class model_class unsupported-model #2", zoo=True)
def _(w: World) -> None:
    for architectures in (["NoSuchModel"], None):
        change_config(w, architectures=architectures)
        w.fails(*w.keep_one())
        w.right(*w.keep_one("--task", "text-classification"))
    folders.save(folders.bert(), w.model)
    w.right(*w.keep_one())


@advice("model_folder.model_class _class_for_task unsupported-model")
def _(w: World) -> None:
    folders.save(folders.gpt2(hf.GPT2ForSequenceClassification), w.file("gpt2"))
    w.fails("gpt2", "--task", "fill-mask", "-o", "out")
    w.right("gpt2", "--task", "text-classification", "-o", "out")


@advice("model_folder.model_class _auto_class unsupported-model")
def _(w: World) -> None:
    w.fails(*w.keep_one("--task", "text-to-audio"))
    w.right(*w.keep_one("--task", "text-classification"))


@advice("model_folder.model_class _auto_class unknown-name")
def _(w: World) -> None:
    w.fails(*w.keep_one("--task", "text-clasification"))
    w.right(*w.keep_one("--task", "text-classification"))


@advice("model_folder.files check_weight_files unsafe-code")
def _(w: World) -> None:
    state = folders.bert().state_dict()
    (w.model / "model.safetensors").unlink()
    torch.save(state, w.model / "pytorch_model.bin")
    w.fails(*w.keep_one())
    w.right(*w.keep_one("--allow-pickle"))
    model = folders.bert()
    model.load_state_dict(torch.load(w.model / "pytorch_model.bin"))
    (w.model / "pytorch_model.bin").unlink()
    model.save_pretrained(w.model)
    w.right(*w.keep_one())


@advice("model_folder.task_names declare_kind contradiction")
def _(w: World) -> None:
    change_config(w, problem_type="multi_label_classification")
    w.rows("tags.tsv", "labels\ttext", *(f"{n % 2}\tthe {folders.WORDS[n % 20]} film" for n in range(40)))
    command = ("model", "--keep", "1", "--training-steps", "2", "--batch", "1", "-o", "out", "--data", "tags.tsv")
    w.fails(*command, "--task", "regression")
    w.right(*command)
    change_config(w, problem_type=None)
    w.right("model", "--task", "multi-label-classification", *command[1:])


@advice("model_folder.network _missing_error text")
def _(w: World) -> None:
    folders.save(folders.tagger(), w.file("tagger"))
    w.fails("tagger", "--task", "text-classification", "-o", "out")
    w.right("tagger", "--task", "token-classification", "-o", "out")


@advice("model_folder.files _check_not_quantized unsupported-model")
def _(w: World) -> None:
    change_config(w, quantization_config={"quant_method": "gptq", "bits": 4})
    w.fails(*w.keep_one())
    change_config(w, quantization_config=None)
    w.right(*w.keep_one("--precision", "int8"))


@advice("model_folder.files _check_header unsupported-model")
def _(w: World) -> None:
    from safetensors.torch import save_file

    name = "bert.encoder.layer.0.output.dense.weight"
    state = folders.bert().state_dict()
    save_file({**state, name: state[name].to(torch.int8)}, w.model / "model.safetensors", {"format": "pt"})
    w.fails(*w.keep_one())
    folders.save(folders.bert(), w.model)
    w.right(*w.keep_one("--precision", "int8"))


@advice("model_folder.network _shape_error text")
def _(w: World) -> None:
    folders.save(hf.BertForMultipleChoice(hf.BertConfig(**folders.SIZES)), w.file("chooser"))
    command = ("chooser", "--task", "text-classification", *w.keep_one()[1:])
    w.fails(*command)
    w.right("chooser", "-o", "out")
    config = hf.BertConfig(**folders.SIZES)
    config.num_labels = 1
    folders.save(hf.BertForMultipleChoice(config), w.file("chooser"))
    w.right(*command)


@advice("model_folder.sentence_modules RerankerModules.wrap unsupported-model")
def _(w: World) -> None:
    rerankers.save_causal_reranker(w.file("answers"))
    folders.save(folders.bert(num_labels=1), w.file("scorer"))
    file = w.file("answers/1_LogitScore/config.json")
    file.write_text(json.dumps({"true_token_id": folders.SIZES["vocab_size"], "false_token_id": 1}))
    w.rows("text.txt", *("the good film was very good and not at all bad ever" for _ in range(40)))
    w.fails("answers", *w.keep_one()[1:])
    w.right("answers", "--task", "causal-lm", *w.keep_one("--data", "text.txt")[1:])
    w.right("scorer", *w.keep_one()[1:])
