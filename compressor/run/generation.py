"""The stage that delivers the graphs with key/value caches of a model that generates."""

from __future__ import annotations

import itertools

from compressor.errors import CompressorError
from compressor.generation.deliver import prove_engines, time_graphs, write_graphs
from compressor.model_folder.example_inputs import token_limit
from compressor.results import Generation, Note, NoteCode, Proof
from compressor.run.run_context import RunContext, SelectedPlan
from compressor.targets.onnxruntime.ort_session import session_settings
from graph_passes import GraphPassError

_PROMPT = 128
"""Length of the texts after which a token is timed, unless the recipe sets one."""


def deliver_generation(run: RunContext, selected: SelectedPlan) -> tuple[Generation | None, tuple[Proof, ...]]:
    """Write the graphs that generate text beside the engine, proven and timed.

    Args:
        run: the run, whose model has the weights of the plan.
        selected: the plan.

    Returns:
        What was written and measured, and the proofs. Nothing where the model does not generate or the recipe wants no
        cache; or where the model cannot be exported with caches, for which there is a note with the reason.
    """
    recipe, folder, log = run.recipe, run.model.folder, run.log
    if not (recipe.export.cache and folder.generates):
        return None, ()
    scratch = run.work.scratch / "generation"
    scratch.mkdir(exist_ok=True)
    try:
        with log.stage("exporting the graphs with caches"):
            files, proofs = write_graphs(
                folder,
                selected.plan,
                run.sizes.cases,
                scratch,
                run.work.result,
                opset=recipe.export.opset,
                attention=recipe.export.attention,
            )
    except (CompressorError, GraphPassError) as error:
        for name in ("encoder.onnx", "decoder.onnx"):
            for file in run.work.result.glob(f"{name}*"):
                file.unlink()
        text = f"the folder has no graphs that generate text, only one that reads a whole text at once: {error}"
        log.add_notes([Note(code=NoteCode.NO_CACHE, text=text)])
        return None, ()
    settings = session_settings("cpu", recipe.engine.threads)
    with log.stage("proving the graphs with caches"):
        engines = prove_engines(files, run.work.result, run.sizes.cases, settings)
    limit = token_limit(folder.model)
    lengths = recipe.measure.prompt_tokens or (min(_PROMPT, (limit or _PROMPT + 1) - 1),)
    generation = time_graphs(
        folder,
        files,
        scratch,
        run.work.result,
        selected.plan,
        itertools.product(recipe.measure.batch, lengths),
        settings,
        seconds=recipe.measure.seconds,
        seed=recipe.selection.seed,
        log=log,
    )
    return generation, (*proofs, engines)
