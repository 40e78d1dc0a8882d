"""Advice of `config`: see `tests.advice.world`."""

from __future__ import annotations

from tests.advice.world import World, advice
from tests.tasks.own_tasks import task_of_the_page, write_module, write_tagged_inputs


@advice("config.ladder recipes_of contradiction #2")
def _(w: World) -> None:
    points = w.rows("points.json", '[{"name": "int8", "metric": 0.9, "speed": 2}]')
    w.fails(*w.run("--speedup", "2", "--compare-points", points))
    w.right(*w.run("--speedup", "2,4", "--compare-points", points))


@advice("config.ladder _rungs contradiction #2")
def _(w: World) -> None:
    w.fails(*w.run("--macs", "80%,80%"))
    w.right(*w.run("--macs", "80%"))


@advice("config.tasks error_of_own_task task-failed")
def _(w: World) -> None:
    write_tagged_inputs(w.path)
    w.patch.syspath_prepend(w.path)
    module = task_of_the_page()
    write_module(w.path, module.replace("tags = self.config.label2id", "tags = 1 / 0"), "bad")
    write_module(w.path, module, "right")
    w.usage_fails(*w.run("--task", "bad:Tags", "--macs", "50%"))
    w.right(*w.run("--task", "right:Tags", "--macs", "50%"))


@advice("config.tasks _refuse code")
def _(w: World) -> None:
    write_tagged_inputs(w.path)
    w.patch.syspath_prepend(w.path)
    module = task_of_the_page()
    write_module(w.path, module, "mine")
    write_module(w.path, "import nothing_like_this\n", "broken")
    for task in ("mine:Taags", "mine:", "nowhere.at_all:Tags", "broken:Tags", "mine:np"):
        w.fails(*w.run("--task", task, "--macs", "50%"))
    w.right(*w.run("--task", "mine:Tags", "--macs", "50%"))


@advice("config.recipe_file RecipeFile.with_flags missing-value")
def _(w: World) -> None:
    w.rows("empty.toml", "keep = 1")
    w.rows("named.toml", "keep = 1", 'model = "model"')
    w.fails("run", "--recipe", "empty.toml", "--data", "rows.tsv")
    w.right("run", "--recipe", "named.toml", "--data", "rows.tsv")
    w.right("model", "--recipe", "empty.toml", "--data", "rows.tsv")


@advice("config.recipe_file stored_recipe missing-value")
def _(w: World) -> None:
    w.rows("named.toml", "keep = 1", 'model = "model"')
    w.fails("run", "--keep", "1", "--data", "rows.tsv")
    w.right("model", "--keep", "1", "--data", "rows.tsv")
    w.right("run", "--recipe", "named.toml", "--data", "rows.tsv")


@advice("config.recipe_file read_recipe file-missing")
def _(w: World) -> None:
    w.rows("named.toml", "keep = 1")
    w.fails(*w.run("--recipe", "nowhere.toml"))
    w.right(*w.run("--recipe", "named.toml"))


@advice("config.recipe_file check_folder_recipe unsafe-recipe")
def _(w: World) -> None:
    w.rows("model/compress.toml", "trust-remote-code = true")
    w.fails(*w.keep_one())
    w.right(*w.keep_one("--recipe", "model/compress.toml"))
    w.rows("model/compress.toml", "keep = 1")
    w.right(*w.keep_one("--trust-remote-code"))


@advice("config.recipe_file check_folder_recipe unsafe-recipe")
def _(w: World) -> None:
    w.rows("model/compress.toml", 'data = "../rows.tsv"')
    w.fails("model", "--keep", "1")
    w.right("model", "--keep", "1", "--recipe", "model/compress.toml")
    w.file("model/compress.toml").unlink()
    w.right("model", "--keep", "1", "--data", "rows.tsv")


@advice("config.sections EngineConfig.require_definite contradiction")
def _(w: World) -> None:
    w.times_nothing()
    bench = ("bench", "dense.onnx", "dense.onnx", "--seconds", "0.01", "--seq", "8", "--batch", "1")
    w.fails(*bench, "--precision", "auto")
    w.right(*bench, "--precision", "fp32")


@advice("config.sections EngineConfig.require_definite contradiction #2")
def _(w: World) -> None:
    w.times_nothing()
    bench = ("bench", "dense.onnx", "dense.onnx", "--seconds", "0.01", "--seq", "8", "--batch", "1")
    w.fails(*bench, "--precision", "int4w")
    w.right(*bench, "--precision", "int8")
