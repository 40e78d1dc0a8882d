"""Advice of `selection`: see `tests.advice.world`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.advice.world import SHORT, World, advice
from tests.tasks import translations


def search(w: World, *flags: str) -> tuple[str | Path, ...]:
    """A search on the rows."""
    return w.run("--batch-size", "8", "--method", *flags)


@advice("selection.certify split_rows unsupported", zoo=True)
def _(w: World) -> None:
    command = search(w, "astar", "--max-drop", "0.5", "--metric", "f1")
    w.fails(*command, "--certify", "0.9")
    w.right(*command)


@advice("selection.certify split_rows out-of-range")
def _(w: World) -> None:
    w.fails(*search(w, "astar", "--max-drop", "0", "--certify", "0.9"))
    w.clear("too-few-rows", *search(w, "astar", "--max-drop", "0.01", "--certify", "0.9"))


@advice("selection.certify split_rows too-few-rows")
def _(w: World) -> None:
    w.fails(*search(w, "astar", "--max-drop", "0.1", "--certify", "0.9"))
    w.right(*search(w, "astar", "--max-drop", "0.9", "--certify", "0.5"))
    words = "good bad film plot the a very not".split()
    lines = [f"{n % 2}\t{words[n % 8]} {words[n // 8 % 8]} {words[n // 64 % 8]} ten" for n in range(200)]
    w.rows("eval.tsv", "label\ttext", *lines)
    w.right(*search(w, "astar", "--max-drop", "0.1", "--certify", "0.9", "--eval-data", "eval.tsv"))


@advice("selection.certify check_rows_unseen rows-overlap")
def _(w: World) -> None:
    command = search(w, "astar", "--max-drop", "0.9", "--certify", "0.5")
    w.fails(*command, "--eval-data", "rows.tsv")
    w.rows("others.tsv", "label\ttext", *(f"{n % 2}\tnine ten {'very ' * (n % 7)}not" for n in range(40)))
    w.right(*command, "--eval-data", "others.tsv")


@advice("selection.checks check_pool contradiction")
def _(w: World) -> None:
    w.fails(*search(w, "dsp", "--macs", "70%", "--options", "pool=kind"))
    w.right(*search(w, "dsp", "--macs", "70%"))
    w.right(*search(w, "dsp", "--keep", "1", "--options", "pool=kind"))


@advice("selection.checks check_max_drop out-of-range")
def _(w: World) -> None:
    w.fails(*search(w, "taylor", "--max-drop", "1"))
    w.right(*search(w, "taylor", "--max-drop", "0.01"))


@advice("selection.learn learn contradiction", zoo=True)
def _(w: World) -> None:
    translations.save(translations.marian(), w.file("marian"))
    file = translations.tsv(w.file("pairs.tsv"), *("\t".join(translations.sentence(seed)) for seed in range(40)))
    command = ("marian", "--task", "translation", "--data", file, *SHORT, "--batch-size", "8", "--method", "taylor")
    w.learns()
    w.fails(*command, "--max-drop", "10", "--metric", "bleu")
    w.right(*command, "--keep", "4", "--metric", "bleu")
    w.right(*command, "--max-drop", "10", "--metric", "loss")


@advice("selection.learn _nothing_removed nothing-removed", zoo=True)
def _(w: World) -> None:
    w.learns()
    w.fails(*search(w, "astar", "--max-drop", "0"))
    w.right(*search(w, "astar", "--max-drop", "0.9"))


def costly_heads(w: World) -> None:
    """Let every removed head cost half of the accuracy."""
    from compressor.selection.subset_evaluator import ModelSubsetEvaluator

    w.patch.setattr(ModelSubsetEvaluator, "evaluate", lambda self, kept: len(kept) / len(self.heads))


@advice("selection.search.base nothing_removed_notes nothing-removed", zoo=True)
def _(w: World) -> None:
    costly_heads(w)
    w.learns()
    w.fails_with_note(*search(w, "taylor", "--max-drop", "0.01"))
    w.right(*search(w, "taylor", "--max-drop", "0.9"))


@advice("selection.search.random_subsets RandomSearch.choose nothing-removed", zoo=True)
def _(w: World) -> None:
    costly_heads(w)
    w.learns()
    w.fails_with_note(*search(w, "random", "--max-drop", "0.01"))
    w.right(*search(w, "random", "--max-drop", "0.9"))


@advice("selection.search.astar _zero_budget text", zoo=True)
def _(w: World) -> None:
    w.learns()
    w.fails_with_note(*search(w, "astar", "--max-drop", "0"))
    w.right(*search(w, "astar", "--max-drop", "0.9"))


@advice("selection.search.taylor TaylorSearch.choose text", zoo=True)
def _(w: World) -> None:
    costly_heads(w)
    w.learns()
    w.fails_with_note(*search(w, "taylor", "--max-drop", "0.6", "--options", "share=1"))
    w.right(*search(w, "taylor", "--max-drop", "0.6", "--options", "share=0.5"))


@advice("selection.options heads_to_keep text")
def _(w: World) -> None:
    w.fails(*search(w, "dsp", "--keep", "3"))
    w.right(*search(w, "dsp", "--keep", "2"))


@advice("selection.allocation require_finite_losses not-finite")
def _(w: World) -> None:
    from compressor.selection.allocation import require_finite_losses

    w.fails(require_finite_losses, "group", {1: float("nan"), 2: 0.0})
    w.right(require_finite_losses, "group", {1: 0.5, 2: 0.0})


@advice("selection.pruners.reconstruct.method require_tokens too-few-rows")
def _(w: World) -> None:
    from compressor.selection.pruners.reconstruct.method import require_tokens

    groups: Any = [SimpleNamespace(name="neurons", linear="output", units=20, width=1)]

    def check(rows: int) -> None:
        network: Any = SimpleNamespace(rows=rows, count_tokens=lambda linears: {"output": 4 * rows})
        require_tokens(network, groups)

    error = w.fails(check, 3)
    w.right(check, error.details["needed"])


@advice("selection.ray_search.evaluator evaluator_factory contradiction")
def _(w: World) -> None:
    from compressor.selection.ray_search import evaluator

    def make_evaluator() -> None:
        with evaluator.evaluator_factory("local"):
            pass

    w.patch.setattr(evaluator, "check_reachable", lambda where: None)
    w.patch.setattr(evaluator, "RayPool", w.stop)
    w.patch.setattr(evaluator, "process_state", lambda: SimpleNamespace(num_processes=2))
    w.fails(make_evaluator)
    w.patch.setattr(evaluator, "process_state", lambda: SimpleNamespace(num_processes=1))
    w.right(make_evaluator)


@advice("selection.pruners.layerwise.output_sensitivity _drawn not-finite")
def _(w: World) -> None:
    from compressor.selection.pruners.layerwise.output_sensitivity import _drawn

    generator = torch.Generator()
    w.fails(_drawn, torch.full((2, 3), float("nan")), generator)
    w.right(_drawn, torch.zeros(2, 3).log_softmax(-1), generator)


@advice("selection.pruners.reconstruct.pruner ReconstructPruner._damping_note text")
def _(w: World) -> None:
    from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner

    def notes(share: float) -> None:
        used = {"neurons": SimpleNamespace(damp=share, ridge=0.0)}
        pruner: Any = SimpleNamespace(options=SimpleNamespace(damp=0.01, ridge=0.0), _used=used)
        ReconstructPruner._damping_note(pruner)

    w.notes(notes, 1.0)
    w.right(notes, 0.01)


RAY = "needs a Ray cluster"


@advice("selection.ray_search.cluster _unavailable server-unreachable", unfollowed=RAY)
def _(w: World) -> None:
    w.learns()
    w.fails(*search(w, "astar", "--keep", "1", "--ray", "127.0.0.1:9"))


@advice("selection.ray_search.cluster _unavailable text", zoo=True)
def _(w: World) -> None:
    from compressor.selection.ray_search import cluster

    w.learns()
    w.patch.setattr("compressor.selection.ray_search.evaluator.check_reachable", lambda where: None)

    def refuse(where: str, restarts: int) -> None:
        raise cluster._unavailable(where, "no memory")

    w.patch.setattr("compressor.selection.ray_search.evaluator.RayPool", refuse)
    w.fails(*search(w, "astar", "--keep", "1", "--ray", "local"))
    w.right(*search(w, "astar", "--keep", "1"))


@advice("selection.ray_search.cluster _unavailable text #2")
def _(w: World) -> None:
    from compressor.selection.ray_search import cluster

    def refuse() -> None:
        raise cluster._unavailable("local", "no memory")

    w.fails(refuse)
    w.right(*search(w, "astar", "--keep", "1"))


@advice("selection.ray_search.cluster check_reachable text", unfollowed="installs a package")
def _(w: World) -> None:
    w.patch.setattr("compressor.selection.ray_search.cluster.is_installed", lambda: False)
    w.learns()
    w.fails(*search(w, "astar", "--keep", "1", "--ray", "local"))


def driver(w: World, error: Exception | None, cores: int = 2) -> Any:
    """A driver on a stand-in of Ray."""
    from compressor.selection.ray_search.cluster import Driver

    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        pass

    def get(pending: object, timeout: float = 0.0) -> list[object]:
        if error is not None:
            raise RayError(str(error))
        return []

    remote = SimpleNamespace(remote=lambda *_: None)
    actor = SimpleNamespace(ready=remote, measure=remote)
    worker = SimpleNamespace(remote=lambda: actor)
    worker.options = lambda **_: worker
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    ray: Any = SimpleNamespace(
        available_resources=lambda: {"CPU": cores}, remote=lambda cls: worker, get=get, exceptions=exceptions
    )
    w.patch.setitem(sys.modules, "ray", ray)
    connected: Any = Driver.__new__(Driver)
    connected._where, connected._restarts, connected._actors, connected._objects = "local:2", 1, [], {}
    return connected


@advice("selection.ray_search.cluster Driver.start_workers device-missing")
def _(w: World) -> None:
    w.fails(lambda: driver(w, None, 0).start_workers(2, 1, 1.0, on_gpu=False))
    w.right(lambda: driver(w, None, 2).start_workers(2, 1, 1.0, on_gpu=False))


@advice("selection.ray_search.cluster Driver.start_workers runtime-failed", unfollowed=RAY)
def _(w: World) -> None:
    w.fails(lambda: driver(w, OSError("no such module")).start_workers(2, 1, 1.0, on_gpu=False))


@advice("selection.ray_search.cluster Driver.measure process-ended")
def _(w: World) -> None:
    w.fails(lambda: driver(w, MemoryError("killed")).measure((), ()))
    w.right(lambda: driver(w, None).measure((), ()))
    w.patch.undo()
    w.patch.chdir(w.path)
    w.right(*search(w, "astar", "--keep", "1", "--ray", "local:1"))
