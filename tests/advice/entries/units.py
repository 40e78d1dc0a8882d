"""Advice of `units`: see `tests.advice.world`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers as hf

from compressor.model_folder import load
from graph_passes import BlockMask
from tests import folders
from tests.advice.world import World, advice


@advice("units.entmax _check_softmax site-refused", zoo=True)
def _(w: World) -> None:
    w.patch.setattr(torch, "allclose", lambda *_, **__: False)
    command = w.run("--drop-blocks", "50%", "--training-steps", "2")
    w.learns()
    w.fails(*command, "--entmax")
    w.patch.undo()
    w.patch.chdir(w.path)
    w.right(*command)


@advice("units.find no_heads_error site-refused")
def _(w: World) -> None:
    config = hf.FNetConfig(vocab_size=25, hidden_size=16, num_hidden_layers=1, intermediate_size=20)
    folders.save(hf.FNetForSequenceClassification(config), w.file("fnet"))
    command = ("fnet", "--data", "rows.tsv", "-o", "out")
    w.fails(*command, "--keep", "1", "--training-steps", "2")
    w.right(*command, "--macs", "70%")


@advice("units.find _run unsupported-model")
def _(w: World) -> None:
    from compressor.units.find import find_sites

    folder = load(w.model)
    w.fails(lambda: find_sites(folder.model, {"input_ids": torch.full((1, 4), 99)}))
    np.savez(w.file("inputs.npz"), input_ids=np.full((2, 8), 99), attention_mask=np.ones((2, 8), np.int64))
    w.fails(*w.keep_one("--inputs", "inputs.npz"))
    np.savez(w.file("inputs.npz"), input_ids=np.ones((2, 8), np.int64), attention_mask=np.ones((2, 8), np.int64))
    w.right(*w.keep_one("--inputs", "inputs.npz"))


@advice("units.hook intercepted.route unsupported", unfollowed="needs two GPUs, on which processes are started")
def _(w: World) -> None:
    from compressor.model_folder import example_inputs
    from compressor.units.hook import intercepted

    folder = load(w.model)
    batch = example_inputs(folder, 1, 4)

    def run() -> None:
        with intercepted(folder.model, lambda call: call.run(), attention=None):
            replica: Any = next(module for name, module in folder.model.named_modules() if name.endswith("self"))
            values = dict(vars(replica))
            kind: Any = type(replica)
            copy = kind.__new__(kind)
            vars(copy).update(values, _is_replica=True, _parameters=dict(replica._parameters))
            parent: Any = folder.model.get_submodule("bert.encoder.layer.0.attention")
            parent.self = copy
            folder.model(**batch)

    w.fails(run)


@advice("units.masking _check_coverage too-long")
def _(w: World) -> None:
    from compressor.units.masking import _check_coverage

    mask = BlockMask(np.ones((2, 1, 1), dtype=bool), 8)
    sizes = {"heads": 2, "memory": 0}
    w.fails(lambda: _check_coverage("site", mask, queries=9, keys=9, **sizes))
    w.right(lambda: _check_coverage("site", mask, queries=8, keys=8, **sizes))
    longer = BlockMask(np.ones((2, 2, 2), dtype=bool), 8)
    w.right(lambda: _check_coverage("site", longer, queries=9, keys=9, **sizes))
