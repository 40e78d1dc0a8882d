"""The commands that are run in both checkouts, in the flags of the base version.

`{inputs}` stands for the folder of the inputs, `{out}` for the case's own folder, `{base}` for the results of the base
checkout, `{encoder}`, `{decoder}` and `{cross}` for kinds of attention.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        line: the arguments of `compress`, of which `study` was a command.
        exit_code: the expected exit code.
        stdout: name of a file in the folder of the case for the standard output, which is compared; None: not compared.
    """

    line: str
    exit_code: int = 0
    stdout: str | None = None


@dataclass(frozen=True)
class Case:
    """A sequence of commands in one folder."""

    name: str
    steps: tuple[Step, ...]

    @property
    def reads_base(self) -> bool:
        """Whether a command reads results of the base checkout."""
        return any("{base}" in step.line for step in self.steps)


_TIMING = "--batch 1 --seconds 0.1 --threads 1"
_PACE = "--steps 6 --batch-size 8 --learning-rate 1e-3"
_PLAN = f"--seq 8 {_TIMING}"
_REVIEWS = (
    "--data {inputs}/reviews-train.tsv --eval-data {inputs}/reviews-eval.tsv --test-data {inputs}/reviews-test.tsv"
    f" --max-length 28 {_PACE}"
)
_COUNTING = (
    "--data {inputs}/counting-train.txt --eval-data {inputs}/counting-eval.txt"
    f" --test-data {{inputs}}/counting-test.txt {_PACE}"
)
_PAIRS = (
    "--task translation --data {inputs}/pairs-train.tsv --eval-data {inputs}/pairs-eval.tsv"
    f" --test-data {{inputs}}/pairs-test.tsv --max-length 12 {_PACE}"
)
_QUESTIONS = (
    "--data {inputs}/questions-train.jsonl --eval-data {inputs}/questions-eval.jsonl"
    f" --test-data {{inputs}}/questions-test.jsonl --max-length 20 --stride 6 {_PACE}"
)
_LONG_TSV = "--data {inputs}/long.tsv --eval-data {inputs}/long.tsv --test-data {inputs}/long.tsv"
_LONG_TXT = "--data {inputs}/long.txt --eval-data {inputs}/long.txt --test-data {inputs}/long.txt"
_LONG = f"--max-length 512 --blocks 0.9 --block-size 64 --everywhere --steps 2 --batch-size 4 --seq 512 {_TIMING}"
_MODEL = "--level word --layers 1 --hidden 16 --heads 4 --persistent 8 --memory 8 --segment 6 --batch-size 3"
_STUDY = "{inputs}/bert --size tiny -o {out}/study --threads 1"


def _bert(options: str) -> Step:
    return Step(f"run {{inputs}}/bert {_REVIEWS} {_PLAN} -o {{out}}/run {options}")


def _rerun(case: str, options: str = "") -> Step:
    """A run with the plan in an output folder of the base version."""
    return Step(f"run {{base}}/{case}/run {_PLAN} -o {{out}}/run {options}")


def _train(architecture: str) -> Step:
    texts = "--data {inputs}/counting-train.txt --eval-data {inputs}/counting-eval.txt"
    pace = "--steps 12 --evaluations 3 --warmup 0.25 --learning-rate 1e-2 --mixed-precision no"
    return Step(f"train {{out}}/model {texts} {_MODEL} {pace} --architecture {architecture}")


_HEADS = {
    "dsp": "--method dsp --keep 4",
    "dsp-pipelined": "--method dsp-pipelined --keep 4 --options cooldown=0.5",
    "ste": "--method ste --keep 50% --options optimizer=lamb,scheduler=cosine",
    "hard-concrete": "--method hard-concrete --lambda 0.5 --options penalty_warmup=0.1",
    "bin-concrete": "--method bin-concrete --keep 3",
    "taylor": "--method taylor --keep 3 --options share=0.3",
    "astar": "--method astar --max-drop 0.2 --options variant=lazy",
    "local": "--method local --keep 5",
    "global": "--method global --max-drop 0.1",
    "random": "--method random --keep 4 --options trials=6,mixed_precision=bf16",
    "certified": "--method taylor --max-drop 0.3 --guarantee 0.9 --options by=loss",
    "blocks": "--blocks 0.5 --block-size 8 --everywhere",
    "heads-and-blocks": "--keep 6 --blocks 60% --block-size 8 --everywhere --restart --watch-rows 20",
    "entmax": "--blocks 0.5 --block-size 1 --entmax --everywhere --weigh-by-rows",
    "empty-rows": "--blocks 0.8 --block-size 8 --everywhere --empty-rows --random-blocks",
}
_APPLY = "apply {inputs}/bert.onnx --plan {inputs}/plans/bert.json -o {out}/small.onnx --json"
_STUDIES = {
    "grid": f"{_REVIEWS} --methods dsp,ste,dsp-pipelined,taylor --keeps 4,2 --seeds 1",
    "astar": f"{_REVIEWS} --budgets 1,30",
    "ablate": _REVIEWS,
    "dynamics": f"{_REVIEWS} --keeps 4",
    "penalty": f"{_REVIEWS} --penalties 0.01,1 --keeps 4",
    "importance": f"{_REVIEWS} --epochs 1",
}

CASES: tuple[Case, ...] = (
    *(Case(name, (_bert(options),)) for name, options in _HEADS.items()),
    Case("plan", (Step(f"run {{inputs}}/bert --plan {{inputs}}/plans/bert.json {_PLAN} -o {{out}}/run"),)),
    Case(
        "plan-grouped-heads",
        (Step(f"run {{inputs}}/llama --plan {{inputs}}/plans/llama.json {_PLAN} --attention sdpa -o {{out}}/run"),),
    ),
    Case("opset-23", (Step(f"run {{inputs}}/bert --opset 23 {_PLAN} -o {{out}}/run"),)),
    Case(
        "missing-target-apply",
        (
            Step(f"run {{inputs}}/bert --target trt {_PLAN} -o {{out}}/run", exit_code=6),
            Step("apply {out}/run/dense.onnx --plan {inputs}/plans/bert.json -o {out}/small.onnx"),
        ),
    ),
    Case(
        "sites-apply",
        (
            Step("sites {inputs}/bert.onnx --json", stdout="graph-sites.json"),
            Step("sites {inputs}/t5 --task translation --json", stdout="folder-sites.json"),
            Step(_APPLY, stdout="apply.json"),
        ),
    ),
    Case("failed-gate", (Step(_bert("--method random --keep 1 --max-drop 0").line, exit_code=4),)),
    Case(
        "question-answering",
        (Step(f"run {{inputs}}/bert-qa {_QUESTIONS} --method ste --keep 4 {_PLAN} -o {{out}}/run"),),
    ),
    Case(
        "translation-heads",
        (Step(f"run {{inputs}}/marian {_PAIRS} --keep 50% --options pool=kind {_PLAN} -o {{out}}/run"),),
    ),
    Case(
        "translation-pool",
        (
            Step(
                f"run {{inputs}}/t5 {_PAIRS} --method taylor --keep 2 --options pool={{decoder}} {_PLAN} -o {{out}}/run"
            ),
        ),
    ),
    Case(
        "translation-blocks",
        (
            Step(
                f"run {{inputs}}/t5 {_PAIRS} --prune {{encoder}}=0.5,{{decoder}}=0.4,{{cross}}=0.25 --block-size 1"
                f" --everywhere {_PLAN} -o {{out}}/run"
            ),
        ),
    ),
    Case(
        "causal-blocks",
        (
            Step(
                f"run {{inputs}}/gpt2 {_COUNTING} --max-length 24 --blocks 0.6 --block-size 8 --everywhere"
                f" --count-causal-zeros {_PLAN} -o {{out}}/run"
            ),
        ),
    ),
    Case("block-sparse", (Step(f"run {{inputs}}/bert-long {_LONG_TSV} {_LONG} -o {{out}}/run"),)),
    Case("causal-block-sparse", (Step(f"run {{inputs}}/gpt2-long {_LONG_TXT} {_LONG} -o {{out}}/run"),)),
    Case(
        "all-attention",
        (
            _train("all-attention"),
            Step(
                f"run {{out}}/model {_COUNTING} --max-length 6 --seq 6 --batch-size 3 {_TIMING} -o {{out}}/run"
                " --method bin-concrete --lambda 0.5 --keep 50%"
                " --options optimizer=lamb,scheduler=cosine,initial=0,penalty_warmup=0"
            ),
        ),
    ),
    Case(
        "transformer-xl",
        (
            _train("transformer-xl"),
            Step(
                f"run {{out}}/model {_COUNTING} --max-length 6 --batch-size 3 --keep 50% --blocks 0.4 --block-size 1"
                f" --everywhere --seq 6 {_TIMING} -o {{out}}/run"
            ),
        ),
    ),
    *(Case(f"study-{kind}", (Step(f"study {kind} {_STUDY} {line}"),)) for kind, line in _STUDIES.items()),
    Case(
        "study-blocks",
        (
            Step(
                f"study blocks {{inputs}}/t5 --size tiny -o {{out}}/study --threads 1 {_PAIRS} --shares 0,0.5"
                " --kinds {encoder}+{decoder},{cross} --masks own --seeds 1 --block-size 1"
            ),
        ),
    ),
    Case("base-recipe", (Step("run --recipe {inputs}/recipes/compress.toml -o {out}/run"),)),
    Case("base-plan", (_rerun("dsp"),)),
    Case("base-plan-kinds", (_rerun("translation-heads", "--task translation"),)),
    Case("base-plan-masks", (_rerun("translation-blocks", "--task translation"),)),
    Case("base-maps", (_bert("--blocks 0.3 --block-size 8 --everywhere --maps {base}/blocks/run"),)),
)
