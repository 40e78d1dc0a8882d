"""Advice on flags that contradict or need each other: see `tests.advice.world`. A valid recipe follows it."""

from __future__ import annotations

import shlex

from tests.advice.world import World, advice

RUN = "model -o out "
ROWS = RUN + "--data rows.tsv "
SERVER = "check --model small --server grpc://127.0.0.1:9 --baseline dense "
LOCAL = "check small.onnx --baseline dense.onnx --batch 1 --inputs rows.tsv --tokenizer model --seq 8 "
EXPORT = "export-triton model -o repository "


def conflict(key: str, failing: str, *right: str) -> None:
    """Add an entry.

    Args:
        key: see `advice_sites`.
        failing: the command that the message ends.
        right: commands that follow the advice.
    """

    def follow(w: World) -> None:
        w.parses()
        w.file("named").mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (w.file("named") / name).write_bytes((w.model / name).read_bytes())
        (w.file("named") / "plan.json").write_bytes(w.file("plan.json").read_bytes())
        w.patch.setattr("compressor.latency.check", w.stop)
        w.patch.setattr("compressor.serving.export", w.stop)
        w.patch.setattr("compressor.training.train.train", w.stop)
        w.fails(*shlex.split(failing))
        for command in right:
            w.right(*shlex.split(command))

    advice(key)(follow)


NAMED = "named -o out --data rows.tsv "
BUDGET = "config.budget_checks "
conflict(BUDGET + "_follows_no_plan text", NAMED + "--macs 50%", ROWS + "--macs 50% --start-from named")
conflict(
    BUDGET + "_follows_no_plan text #2",
    ROWS + "--macs 50% --plan plan.json",
    ROWS + "--macs 50%",
    ROWS + "--plan plan.json",
    ROWS + "--macs 50% --start-from named",
)
conflict(
    BUDGET + "_follows_no_plan contradiction",
    ROWS + "--macs 50% --plan plan.json",
    ROWS + "--macs 50%",
    ROWS + "--plan plan.json",
)
conflict(BUDGET + "_has_rows missing-value", RUN + "--macs 50%", ROWS + "--macs 50%")
UNITS = "config.steps Units._has_a_budget_that_can_be_met "
UNIT_TYPES = "config.steps Units._removes_units_of_a_type_that_is_counted "
conflict(UNITS + "contradiction", ROWS + "--speedup 2 --latency 5ms", ROWS + "--speedup 2", ROWS + "--latency 5ms")
conflict(
    UNITS + "contradiction #2",
    ROWS + "--parameters 50% --budget-at 1x128",
    ROWS + "--parameters 50% --budget-at 1x128 --speedup 2",
    ROWS + "--parameters 50% --budget-at 1x128 --latency 5ms",
    ROWS + "--parameters 50% --budget-at 1x128 --macs 50%",
)
conflict(
    UNITS + "missing-value",
    ROWS + "--method reconstruct",
    *(ROWS + f"--method reconstruct --{flag}" for flag in ("speedup 2", "latency 5ms", "macs 50%", "parameters 50%")),
    ROWS + "--method reconstruct --keep 1",
    ROWS + "--method reconstruct --max-drop 0.1",
)
conflict(
    "config.steps Heads._decides_how_many_heads_stay missing-value",
    ROWS + "--method taylor",
    ROWS + "--method taylor --keep 50%",
    ROWS + "--method taylor --max-drop 0.1",
)
STEPS = "config.step_list _check_written "
PRUNED = ROWS + "--steps '[{ units = { macs = 0.5 } }]'"
conflict(
    STEPS + "contradiction",
    ROWS + "--steps '[{ units = { macs = 0.5 } }, { heads = { keep = 1 } }]'",
    ROWS + "--steps '[{ heads = { keep = 1 } }, { units = { macs = 0.5 } }]'",
    PRUNED,
)
conflict(STEPS + "contradiction #4", PRUNED + " --keep 1", PRUNED, ROWS + "--keep 1")
conflict(STEPS + "missing-value", RUN + "--steps '[{ units = { macs = 0.5 } }]'", PRUNED)
conflict(
    STEPS + "missing-value #2",
    ROWS + "--steps '[{ distill = { } }]'",
    ROWS + "--steps '[{ units = { macs = 0.5 } }, { distill = { } }]'",
    ROWS + "--steps \"[{ distill = { teacher = 'model' } }]\"",
)
conflict("config.steps steps_from invalid-value", ROWS + "--steps '[{'", PRUNED)
conflict("config.steps steps_from invalid-value #2", ROWS + "--keep 1 --steps 4", ROWS + "--keep 1 --training-steps 4")


conflict(
    STEPS + "contradiction #2",
    "named -o out --data rows.tsv --steps '[{ units = { macs = 0.5 } }]'",
    "named -o out --data rows.tsv --steps \"[{ follow = { plan = 'named/plan.json' } }]\"",
    PRUNED,
)
conflict(
    STEPS + "contradiction #3",
    ROWS + "--steps \"[{ heads = { keep = 1 } }, { units = { macs = 0.5, prune_units = 'heads' } }]\"",
    ROWS + "--steps '[{ heads = { keep = 1 } }, { units = { macs = 0.5 } }]'",
    ROWS + "--steps \"[{ units = { macs = 0.5, prune_units = 'heads' } }]\"",
)
conflict(
    "config.ladder recipes_of contradiction #2",
    ROWS + "--macs 50%,40% --steps '[{ units = { macs = 0.5 } }]'",
    ROWS + "--macs 50%,40%",
    PRUNED,
)
conflict(
    "config.recipe_checks _check_selection missing-value",
    ROWS + "--epochs 2",
    *(ROWS + f"--{flag}" for flag in ("speedup 2", "latency 5ms", "macs 50%", "parameters 50%", "max-drop 0.1")),
    ROWS + "--epochs 2 --keep 1",
)


@advice("config.step_list with_flags contradiction")
def _(w: World) -> None:
    w.parses()
    file = w.rows("run.toml", "[[steps]]", "units = { macs = 0.5 }")
    w.fails(*shlex.split(ROWS), "--recipe", file, "--drop-blocks", "50%")
    w.rows("run.toml", "[[steps]]", "blocks = { share = 0.5 }")
    w.right(*shlex.split(ROWS), "--recipe", file)


@advice("config.recipe_file _check_folder_step unsafe-recipe")
def _(w: World) -> None:
    w.parses()
    file = w.rows("model/compress.toml", "[[steps]]", 'heads = { method = "taylor", keep = 1, ray = "local" }')
    w.fails(*shlex.split(ROWS))
    w.right(*shlex.split(ROWS), "--recipe", file)


conflict(
    BUDGET + "_starts_from_a_run_of_its_method contradiction",
    ROWS + "--macs 50% --start-from named --method dsp",
    ROWS + "--macs 50% --method dsp",
    ROWS + "--macs 50% --start-from named --method fisher",
)
conflict(
    UNITS + "contradiction #3",
    ROWS + "--start-from named --max-drop 0.01",
    ROWS + "--start-from named --max-drop 0.01 --speedup 2",
)
conflict(
    BUDGET + "_drops_no_blocks contradiction",
    ROWS + "--macs 50% --drop-blocks 50%",
    ROWS + "--macs 50%",
    ROWS + "--drop-blocks 50%",
)
conflict(
    UNIT_TYPES + "contradiction",
    ROWS + "--macs 50% --keep 1 --method reconstruct",
    ROWS + "--macs 50% --method reconstruct",
    ROWS + "--keep 1 --method reconstruct",
    ROWS + "--macs 50% --keep 1 --method dsp",
)

CHECK = "config.check CheckRequest."
conflict(
    CHECK + "_fields_have_an_effect text",
    SERVER + "--threads 1",
    SERVER,
    "check small.onnx --baseline dense.onnx --threads 1",
)
conflict(
    CHECK + "_fields_have_an_effect text #2",
    "check small.onnx --baseline dense.onnx --gzip",
    "check --model small --server http://127.0.0.1:9 --baseline dense --gzip",
    "check small.onnx --baseline dense.onnx",
)
conflict(
    CHECK + "_fields_have_an_effect text #3",
    SERVER + "--certificate authority.pem",
    "check --model small --server grpcs://127.0.0.1:9 --baseline dense --certificate authority.pem",
    "check --model small --server https://127.0.0.1:9 --baseline dense --certificate authority.pem",
    SERVER,
)
conflict(
    CHECK + "_fields_have_an_effect text #4",
    LOCAL + "--expect any --tolerance 0.1",
    LOCAL + "--expect any",
    LOCAL + "--tolerance 0.1",
)
conflict(
    CHECK + "_fields_have_an_effect text #5",
    "check small.onnx --baseline dense.onnx --tokenizer model",
    LOCAL,
    "check small.onnx --baseline dense.onnx",
)
conflict(
    CHECK + "_fields_have_an_effect contradiction",
    "check small.onnx --baseline dense.onnx --text-columns text",
    LOCAL + "--text-columns text",
    "check small.onnx --baseline dense.onnx",
)
conflict(
    CHECK + "_check_conflicts contradiction",
    SERVER + "--p99 5ms --scenario offline",
    SERVER + "--p99 5ms --scenario offline,singlestream",
    SERVER + "--p99 5ms --scenario offline,server",
)
conflict(CHECK + "_check_conflicts contradiction #2", SERVER + "--rate 9", SERVER + "--rate 9 --scenario server")
conflict(
    CHECK + "_check_conflicts contradiction #3",
    SERVER + "--kernel kernel.so",
    SERVER,
    "check small.onnx --baseline dense.onnx --kernel kernel.so",
)
conflict(
    CHECK + "_check_conflicts contradiction #4",
    "check --model small --server http://127.0.0.1:9 --baseline dense --p99 5ms",
    SERVER + "--p99 5ms",
)
conflict(
    CHECK + "_check_conflicts invalid-value",
    SERVER + "--save-baseline base.txt",
    SERVER + "--save-baseline base.json",
)
PLOT = "config.check CheckArtifacts._check_plot "
conflict(PLOT + "contradiction", SERVER + "--plot times.svg", SERVER + "--plot times.svg --history checks.jsonl")
conflict(
    PLOT + "invalid-value",
    SERVER + "--plot times.txt --history checks.jsonl",
    SERVER + "--plot times.svg --history checks.jsonl",
    SERVER + "--plot times.png --history checks.jsonl",
)

DISTILL = "config.distillation_checks "
conflict(
    DISTILL + "_has_training_rows missing-value",
    RUN + "--distill --plan plan.json",
    ROWS + "--distill --plan plan.json",
)
conflict(
    DISTILL + "_removes_something missing-value",
    ROWS + "--distill --keep 100% --precision int8",
    ROWS + "--distill --speedup 2",
    ROWS + "--distill --keep 1",
    ROWS + "--distill --plan plan.json",
)
conflict(
    "config.step_list _check_documents contradiction",
    ROWS + "--macs 50% --match-dense --distill --teacher named",
    ROWS + "--macs 50% --match-dense --distill",
    ROWS + "--macs 50% --distill --teacher named",
)
conflict(
    "config.step_list _check_documents contradiction #2",
    ROWS + "--plan plan.json --match-dense",
    ROWS + "--macs 50% --match-dense",
    ROWS + "--plan plan.json",
)
conflict(
    DISTILL + "_sets_no_unused_field contradiction",
    ROWS + "--macs 50% --temperature 3",
    ROWS + "--macs 50% --temperature 3 --distill",
    ROWS + "--macs 50%",
)
conflict(
    "config.step_list check_steps contradiction",
    ROWS + "--macs 50% --distill --quantized-share 0.5",
    ROWS + "--macs 50% --distill --quantized-share 0.5 --precision int8",
    ROWS + "--macs 50% --distill --quantized-share 0.5 --precision bf16 --target trt",
    ROWS + "--macs 50% --distill --quantized-share 0.5 --precision auto",
    ROWS + "--macs 50% --distill",
)

RECIPE = "config.recipe_checks "
conflict(RECIPE + "_check_rows missing-value", RUN + "--keep 1", ROWS + "--keep 1", RUN + "--keep 1 --plan plan.json")
conflict(
    RECIPE + "check_settings missing-value",
    RUN + "--plan plan.json --max-drop 0.1",
    ROWS + "--plan plan.json --max-drop 0.1",
)
conflict(
    "config.step_list _check_unlabelled_rows missing-value",
    RUN + "--plan plan.json --unlabelled-data more.txt",
    RUN + "--plan plan.json --data more.txt",
)
conflict(
    "config.step_list _check_unlabelled_rows contradiction",
    ROWS + "--keep 1 --unlabelled-data more.txt",
    ROWS + "--keep 1",
    ROWS + "--macs 50% --unlabelled-data more.txt",
)
conflict(
    "config.step_list _check_unlabelled_rows contradiction #2",
    ROWS + "--plan plan.json --unlabelled-data more.txt",
    ROWS + "--unlabelled-data more.txt --speedup 2",
    ROWS + "--plan plan.json --unlabelled-data more.txt --distill",
    ROWS + "--plan plan.json",
)
conflict(
    RECIPE + "_check_engine contradiction",
    ROWS + "--keep 1 --target openvino --provider cuda",
    ROWS + "--keep 1 --target openvino",
    ROWS + "--keep 1 --target ort --provider cuda",
)
conflict(
    RECIPE + "_check_engine contradiction #2",
    ROWS + "--keep 1 --target openvino --kernel kernel.so",
    ROWS + "--keep 1 --target openvino",
)
conflict(RECIPE + "_check_blocks missing-value", RUN + "--drop-blocks 50%", ROWS + "--drop-blocks 50%")
conflict(
    RECIPE + "_check_blocks contradiction",
    ROWS + "--drop-blocks 50% --plan plan.json",
    ROWS + "--drop-blocks 50%",
    ROWS + "--plan plan.json",
)
conflict(
    RECIPE + "_check_blocks contradiction #2",
    NAMED + "--drop-blocks 50% --keep 1",
    NAMED + "--drop-blocks 50%",
)
conflict(
    "config.steps Blocks._ranks_blocks_by_the_maps contradiction",
    ROWS + "--drop-blocks 50% --maps maps.safetensors --entmax",
    ROWS + "--drop-blocks 50% --maps maps.safetensors",
    ROWS + "--drop-blocks 50% --entmax",
)
conflict(
    "config.steps Blocks._ranks_blocks_by_the_maps contradiction #2",
    ROWS + "--drop-blocks 50% --random-blocks --entmax",
    ROWS + "--drop-blocks 50% --random-blocks",
    ROWS + "--drop-blocks 50% --entmax",
)
conflict(
    RECIPE + "_check_grouping contradiction",
    ROWS + "--keep 1 --method dsp --group-by query",
    ROWS + "--keep 1 --method dsp",
    ROWS + "--keep 1 --method magnitude --group-by query",
)
conflict(
    UNIT_TYPES + "contradiction #2",
    ROWS + "--macs 50% --group-by query --prune-units neurons",
    ROWS + "--macs 50% --group-by query",
    ROWS + "--macs 50% --prune-units neurons",
)
conflict(
    RECIPE + "_check_prune_units contradiction",
    ROWS + "--macs 50% --method taylor --keep 1 --prune-units heads",
    ROWS + "--macs 50% --method taylor --keep 1",
    ROWS + "--macs 50% --method fisher --prune-units heads",
)
SELECTION = RECIPE + "_check_selection "
conflict(
    SELECTION + "contradiction",
    ROWS + "--method dsp --keep 1 --ray local",
    *(ROWS + f"--method {method} --keep 1 --ray local" for method in ("taylor", "astar", "random")),
)
CERTIFICATE = "config.step_list _check_certificate "
conflict(
    "config.steps no_loss_to_certify contradiction",
    ROWS + "--method dsp --keep 1 --certify 0.9",
    ROWS + "--max-drop 0.1 --certify 0.9",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9",
)
conflict(
    CERTIFICATE + "contradiction #2",
    ROWS + "--max-drop 0.1 --certify 0.9 --precision int8",
    ROWS + "--max-drop 0.1 --certify 0.9",
    ROWS + "--max-drop 0.1 --precision int8",
)
conflict(
    CERTIFICATE + "contradiction",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9 --macs 50%",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9",
    ROWS + "--method taylor --max-drop 0.1 --macs 50%",
)
conflict(
    "config.steps Heads._certifies_what_a_search_spends contradiction",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9 --keep 1",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9",
    ROWS + "--method taylor --max-drop 0.1 --keep 1",
)

SERVE = "config.serve ServeRequest._check_conflicts "
conflict(SERVE + "invalid-value", EXPORT + "--name a/b", EXPORT + "--name a-b_c.d1")
conflict(
    SERVE + "contradiction",
    EXPORT + "--engine engine.plan --backend onnxruntime",
    EXPORT + "--engine engine.plan",
    EXPORT + "--backend onnxruntime",
)
conflict(
    SERVE + "contradiction #2",
    EXPORT + "--text-columns text",
    EXPORT + "--text-columns text --data rows.tsv",
    EXPORT,
)
conflict(
    SERVE + "contradiction #3",
    EXPORT + "--gpus 0 --device cpu",
    EXPORT + "--device cpu",
    EXPORT + "--gpus 0",
)

TRAIN = "train out --data rows.tsv "
FIELDS = "config.train Training._fields_agree "
conflict(FIELDS + "contradiction", TRAIN + "--hidden 30 --heads 4", TRAIN + "--hidden 32 --heads 4")
conflict(
    FIELDS + "contradiction #2",
    TRAIN + "--learning-rate 0.001 --final-learning-rate 0.01",
    TRAIN + "--learning-rate 0.001 --final-learning-rate 0.0001",
)
conflict(FIELDS + "contradiction #3", TRAIN + "--level character --vocabulary 40", TRAIN + "--level character")
