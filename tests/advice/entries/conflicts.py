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
        w.patch.setattr("compressor.generation.runner.load_engine", w.stop)
        w.fails(*shlex.split(failing))
        for command in right:
            w.right(*shlex.split(command))

    advice(key)(follow)


NAMED = "named -o out --data rows.tsv "
RULES = "config.rules "
ORDER = RULES + "_check_order contradiction"
conflict(
    RULES + "_check_order text",
    ROWS + "--steps '[{ within = { max_drop = 0.1, steps = [{ units = {} }] } }, { distill = {} }]'",
    ROWS + "--steps '[{ within = { max_drop = 0.1, steps = [{ units = {} }] } }]'",
    ROWS + "--steps '[{ within = { max_drop = 0.1, steps = [{ units = {} }, { distill = {} }] } }]'",
)
conflict(
    RULES + "_check_order text #4",
    ROWS + "--max-drop 0.1 --method reconstruct --drop-blocks 50%",
    ROWS + "--max-drop 0.1 --method reconstruct --drop-blocks 50% --speedup 2",
    ROWS + "--max-drop 0.1 --method reconstruct",
    ROWS + "--drop-blocks 50%",
)
conflict(
    RULES + "_check_order text #2",
    NAMED + "--macs 50% --start-from named",
    NAMED + "--macs 50%",
    ROWS + "--macs 50% --start-from named",
)
conflict(
    RULES + "_check_order text #3",
    ROWS + "--macs 50% --method dsp --plan plan.json",
    ROWS + "--macs 50% --method dsp",
    ROWS + "--speedup 2 --plan plan.json",
)
conflict(
    ORDER,
    ROWS + "--macs 50% --start-from named --plan plan.json",
    ROWS + "--macs 50% --start-from named",
    ROWS + "--macs 50% --plan plan.json",
)
conflict(
    "config.ladder _rungs contradiction",
    NAMED + "--macs 50%,40%",
    NAMED + "--macs 50%",
)
conflict(RULES + "fact rule", RUN + "--macs 50%", ROWS + "--macs 50%")
UNITS = "config.steps Units."
conflict(UNITS + "speedup rule", ROWS + "--speedup 2 --latency 5ms", ROWS + "--speedup 2", ROWS + "--latency 5ms")
conflict(
    UNITS + "budget_at rule",
    ROWS + "--parameters 50% --budget-at 1x128",
    ROWS + "--parameters 50% --budget-at 1x128 --speedup 2",
    ROWS + "--parameters 50% --budget-at 1x128 --latency 5ms",
    ROWS + "--parameters 50% --budget-at 1x128 --macs 50%",
)
conflict(
    RULES + "has_no_bound rule",
    ROWS + "--method reconstruct",
    *(ROWS + f"--method reconstruct --{flag}" for flag in ("speedup 2", "latency 5ms", "macs 50%", "parameters 50%")),
    ROWS + "--method reconstruct --keep 1",
    ROWS + "--method reconstruct --max-drop 0.1",
)
conflict(
    "config.steps Heads.searches rule",
    ROWS + "--method taylor",
    ROWS + "--method taylor --keep 50%",
    ROWS + "--method taylor --max-drop 0.1",
)
PRUNED = ROWS + "--steps '[{ units = { macs = 0.5 } }]'"
conflict(
    RULES + "_check_order contradiction #2",
    ROWS + "--steps '[{ units = { macs = 0.5 } }, { heads = { keep = 1 } }]'",
    ROWS + "--steps '[{ heads = { keep = 1 } }, { units = { macs = 0.5 } }]'",
    PRUNED,
)
conflict(RULES + "check text", PRUNED + " --keep 1", PRUNED, ROWS + "--keep 1")
conflict(RULES + "fact rule", RUN + "--steps '[{ units = { macs = 0.5 } }]'", PRUNED)
conflict(
    RULES + "begins_to_distill rule",
    ROWS + "--steps '[{ distill = { } }]'",
    ROWS + "--steps '[{ units = { macs = 0.5 } }, { distill = { } }]'",
    ROWS + "--steps \"[{ distill = { teacher = 'model' } }]\"",
)
conflict("config.steps steps_from invalid-value", ROWS + "--steps '[{'", PRUNED)
conflict("config.steps steps_from invalid-value #2", ROWS + "--keep 1 --steps 4", ROWS + "--keep 1 --training-steps 4")


conflict(
    RULES + "ignores_plan rule",
    "named -o out --data rows.tsv --steps '[{ units = { macs = 0.5 } }]'",
    "named -o out --data rows.tsv --steps \"[{ follow = { plan = 'named/plan.json' } }]\"",
    PRUNED,
)
conflict(
    RULES + "_check_units_after_heads contradiction",
    ROWS + "--steps \"[{ heads = { keep = 1 } }, { units = { macs = 0.5, prune_units = 'heads' } }]\"",
    ROWS + "--steps '[{ heads = { keep = 1 } }, { units = { macs = 0.5 } }]'",
    ROWS + "--steps \"[{ units = { macs = 0.5, prune_units = 'heads' } }]\"",
)
conflict(
    "config.ladder recipes_of contradiction",
    ROWS + "--macs 50%,40% --steps '[{ units = { macs = 0.5 } }]'",
    ROWS + "--macs 50%,40%",
    PRUNED,
)
conflict(
    RULES + "requests_nothing rule",
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


@advice("config.recipe_file check_folder_recipe unsafe-recipe")
def _(w: World) -> None:
    w.parses()
    file = w.rows("model/compress.toml", "[[steps]]", 'heads = { method = "taylor", keep = 1, ray = "local" }')
    w.fails(*shlex.split(ROWS))
    w.right(*shlex.split(ROWS), "--recipe", file)


conflict(
    UNITS + "option rule",
    ROWS + "--macs 50% --start-from named --method dsp",
    ROWS + "--macs 50% --method dsp",
    ROWS + "--macs 50% --start-from named --method fisher",
)
conflict(
    UNITS + "start_from rule",
    ROWS + "--start-from named --max-drop 0.01",
    ROWS + "--start-from named --max-drop 0.01 --speedup 2",
)
conflict(
    ORDER,
    ROWS + "--steps '[{ blocks = { share = 0.5 } }, { units = { macs = 0.5 } }]'",
    ROWS + "--steps '[{ units = { macs = 0.5 } }, { blocks = { share = 0.5 } }]'",
    ROWS + "--macs 50% --drop-blocks 50%",
)
conflict(
    UNITS + "keep rule",
    ROWS + "--macs 50% --keep 1 --method reconstruct",
    ROWS + "--macs 50% --method reconstruct",
    ROWS + "--keep 1 --method reconstruct",
    ROWS + "--macs 50% --keep 1 --method dsp",
)

CHECK = "config.check CheckRequest."
STREAM = "check http://127.0.0.1:9/v1/completions --baseline http://127.0.0.1:9/v1/completions "
conflict(CHECK + "server rule", SERVER + "--prompt-tokens 8", STREAM + "--prompt-tokens 8")
conflict(CHECK + "new_tokens rule", SERVER + "--new-tokens 8", SERVER, "check out --baseline out --prompt-tokens 8")
FOLDERS = "check out --baseline dense --prompt-tokens 8 "
conflict(CHECK + "name rule", FOLDERS + "--batch 2", FOLDERS)
conflict(CHECK + "name rule #2", STREAM + "--p99 5ms", STREAM)
conflict(
    CHECK + "is_mixed rule", STREAM.replace("check http://127.0.0.1:9/v1/completions", "check out"), STREAM, FOLDERS
)
conflict(CHECK + "tolerance rule", STREAM + "--tolerance 0.1", STREAM)
conflict(CHECK + "expects_file rule", STREAM + "--expect out", STREAM + "--expect baseline", STREAM)
conflict(
    CHECK + "threads rule",
    SERVER + "--threads 1",
    SERVER,
    "check small.onnx --baseline dense.onnx --threads 1",
)
conflict(
    CHECK + "name rule #3",
    "check small.onnx --baseline dense.onnx --gzip",
    "check --model small --server http://127.0.0.1:9 --baseline dense --gzip",
    "check small.onnx --baseline dense.onnx",
)
conflict(
    CHECK + "certificate rule",
    SERVER + "--certificate authority.pem",
    "check --model small --server grpcs://127.0.0.1:9 --baseline dense --certificate authority.pem",
    "check --model small --server https://127.0.0.1:9 --baseline dense --certificate authority.pem",
    SERVER,
)
conflict(
    CHECK + "tolerance rule #2",
    LOCAL + "--expect any --tolerance 0.1",
    LOCAL + "--expect any",
    LOCAL + "--tolerance 0.1",
)
conflict(
    CHECK + "name rule #4",
    "check small.onnx --baseline dense.onnx --tokenizer model",
    LOCAL,
    "check small.onnx --baseline dense.onnx",
)
conflict(
    CHECK + "name rule #4",
    "check small.onnx --baseline dense.onnx --text-columns text",
    LOCAL + "--text-columns text",
    "check small.onnx --baseline dense.onnx",
)
conflict(
    CHECK + "p99 rule",
    SERVER + "--p99 5ms --scenario offline",
    SERVER + "--p99 5ms --scenario offline,singlestream",
    SERVER + "--p99 5ms --scenario offline,server",
)
conflict(CHECK + "rate rule", SERVER + "--rate 9", SERVER + "--rate 9 --scenario server")
conflict(
    CHECK + "kernel rule",
    SERVER + "--kernel kernel.so",
    SERVER,
    "check small.onnx --baseline dense.onnx --kernel kernel.so",
)
conflict(
    CHECK + "is_http rule",
    "check --model small --server http://127.0.0.1:9 --baseline dense --p99 5ms",
    SERVER + "--p99 5ms",
)
conflict(
    "config.check CheckArtifacts.plot rule",
    SERVER + "--plot times.svg",
    SERVER + "--plot times.svg --history checks.jsonl",
)

conflict(
    RULES + "fact rule",
    RUN + "--distill --plan plan.json",
    ROWS + "--distill --plan plan.json",
)
conflict(
    RULES + "begins_to_distill rule",
    ROWS + "--distill --keep 100% --precision int8",
    ROWS + "--distill --speedup 2",
    ROWS + "--distill --keep 1",
    ROWS + "--distill --plan plan.json",
)
conflict(
    RULES + "match_dense rule",
    ROWS + "--macs 50% --match-dense --distill --teacher named",
    ROWS + "--macs 50% --match-dense --distill",
    ROWS + "--macs 50% --distill --teacher named",
)
conflict(
    RULES + "match_dense rule #2",
    ROWS + "--plan plan.json --match-dense",
    ROWS + "--macs 50% --match-dense",
    ROWS + "--plan plan.json",
)
conflict(
    RULES + "name rule",
    ROWS + "--macs 50% --temperature 3",
    ROWS + "--macs 50% --temperature 3 --distill",
    ROWS + "--macs 50%",
)
conflict(
    RULES + "quantized_share rule",
    ROWS + "--macs 50% --distill --quantized-share 0.5",
    ROWS + "--macs 50% --distill --quantized-share 0.5 --precision int8",
    ROWS + "--macs 50% --distill --quantized-share 0.5 --precision bf16 --target trt",
    ROWS + "--macs 50% --distill --quantized-share 0.5 --precision auto",
    ROWS + "--macs 50% --distill",
)

conflict(RULES + "constant text", RUN + "--keep 1", ROWS + "--keep 1", RUN + "--keep 1 --plan plan.json")
conflict(
    RULES + "max_drop rule",
    RUN + "--plan plan.json --max-drop 0.1",
    ROWS + "--plan plan.json --max-drop 0.1",
)
conflict(
    RULES + "unlabelled_data rule",
    RUN + "--plan plan.json --unlabelled-data more.txt",
    RUN + "--plan plan.json --data more.txt",
)
conflict(
    RULES + "unlabelled_data rule #2",
    ROWS + "--keep 1 --unlabelled-data more.txt",
    ROWS + "--keep 1",
    ROWS + "--macs 50% --unlabelled-data more.txt",
)
conflict(
    RULES + "unlabelled_data rule #3",
    ROWS + "--plan plan.json --unlabelled-data more.txt",
    ROWS + "--unlabelled-data more.txt --speedup 2",
    ROWS + "--plan plan.json --unlabelled-data more.txt --distill",
    ROWS + "--plan plan.json",
)
conflict(
    RULES + "provider rule",
    ROWS + "--keep 1 --target openvino --provider cuda",
    ROWS + "--keep 1 --target openvino",
    ROWS + "--keep 1 --target ort --provider cuda",
)
conflict(
    RULES + "kernel rule",
    ROWS + "--keep 1 --target openvino --kernel kernel.so",
    ROWS + "--keep 1 --target openvino",
)
conflict(RULES + "fact rule", RUN + "--drop-blocks 50%", ROWS + "--drop-blocks 50%")
conflict(
    ORDER,
    ROWS + "--drop-blocks 50% --plan plan.json",
    ROWS + "--drop-blocks 50%",
    ROWS + "--plan plan.json",
)
conflict(
    ORDER,
    NAMED + "--drop-blocks 50% --keep 1",
    NAMED + "--drop-blocks 50%",
)
conflict(
    "config.steps Blocks.maps rule",
    ROWS + "--drop-blocks 50% --maps maps.safetensors --entmax",
    ROWS + "--drop-blocks 50% --maps maps.safetensors",
    ROWS + "--drop-blocks 50% --entmax",
)
conflict(
    "config.steps Blocks.random_blocks rule",
    ROWS + "--drop-blocks 50% --random-blocks --entmax",
    ROWS + "--drop-blocks 50% --random-blocks",
    ROWS + "--drop-blocks 50% --entmax",
)
conflict(
    RULES + "group_by rule",
    ROWS + "--keep 1 --method dsp --group-by query",
    ROWS + "--keep 1 --method dsp",
    ROWS + "--keep 1 --method magnitude --group-by query",
)
conflict(
    UNITS + "option rule #2",
    ROWS + "--macs 50% --group-by query --prune-units neurons",
    ROWS + "--macs 50% --group-by query",
    ROWS + "--macs 50% --prune-units neurons",
)
conflict(
    RULES + "_check_units_after_heads text",
    ROWS + "--macs 50% --method taylor --keep 1 --prune-units heads",
    ROWS + "--macs 50% --method taylor --keep 1",
    ROWS + "--macs 50% --method fisher --prune-units heads",
)
conflict(
    "config.steps ray rule",
    ROWS + "--method dsp --keep 1 --ray local",
    *(ROWS + f"--method {method} --keep 1 --ray local" for method in ("taylor", "astar", "random")),
)
conflict(
    "config.steps Heads.ranks rule",
    ROWS + "--method dsp --speedup 2",
    ROWS + "--method dsp --speedup 2 --keep 50%",
)
conflict(
    "config.steps Heads.max_drop rule",
    ROWS + "--steps '[{ heads = { keep = 1, max_drop = 0.1 } }]'",
    ROWS + "--steps '[{ heads = { keep = 1 } }]'",
    ROWS + "--steps \"[{ heads = { method = 'taylor', max_drop = 0.1 } }]\"",
)
conflict(
    "config.steps Blocks.drops_none rule",
    ROWS + "--steps '[{ blocks = { block_size = 8 } }]'",
    ROWS + "--steps '[{ blocks = { block_size = 8, share = 0.5 } }]'",
    PRUNED,
)
conflict(
    UNITS + "learns rule",
    ROWS + "--steps \"[{ units = { method = 'dsp', max_drop = 0.1 } }]\"",
    ROWS + "--steps \"[{ units = { method = 'dsp', max_drop = 0.1, macs = 0.5 } }]\"",
    ROWS + "--steps \"[{ units = { method = 'dsp', max_drop = 0.1, parameters = 0.5 } }]\"",
)
conflict(
    UNITS + "learns rule #2",
    ROWS + "--steps \"[{ units = { method = 'dsp', speedup = 2 } }]\"",
    ROWS + "--steps \"[{ units = { method = 'dsp', macs = 0.5 } }]\"",
    ROWS + "--steps \"[{ units = { method = 'reconstruct', speedup = 2 } }]\"",
)
WITHIN = "config.steps Within."
ATTEMPTS = ROWS + "--steps '[{ within = { max_drop = 0.1, steps = [%s] } }]'"
IN_TIME = ROWS + "--steps '[{ within = { max_drop = 0.1, minutes = 9, steps = [%s] } }]'"
conflict(
    WITHIN + "has_other_steps rule",
    ATTEMPTS % "{ distill = {} }",
    ATTEMPTS % "{ units = {} }, { distill = {} }",
    ATTEMPTS % "{ units = {} }",
)
conflict(
    WITHIN + "has_other_bounds rule",
    ATTEMPTS % "{ units = { certify = 0.9 } }, { distill = {} }",
    ATTEMPTS % "{ units = {} }, { distill = {} }",
    ATTEMPTS % "{ units = { certify = 0.9 } }",
    ROWS + "--steps '[{ units = { max_drop = 0.1, certify = 0.9 } }]'",
)
conflict(
    WITHIN + "minutes rule",
    IN_TIME % "{ units = {} }, { distill = { minutes = 3 } }",
    IN_TIME % "{ units = {} }, { distill = {} }",
    ATTEMPTS % "{ units = {} }, { distill = { minutes = 3 } }",
)
conflict(
    WITHIN + "minutes rule #2",
    IN_TIME % "{ units = {} }",
    ATTEMPTS % "{ units = {} }",
    IN_TIME % "{ units = {} }, { distill = {} }",
)
CERTIFICATE = RULES + "certified rule"
conflict(
    "config.steps constant text",
    ROWS + "--method dsp --keep 1 --certify 0.9",
    ROWS + "--max-drop 0.1 --certify 0.9",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9",
)
conflict(
    CERTIFICATE + " #2",
    ROWS + "--max-drop 0.1 --certify 0.9 --precision int8",
    ROWS + "--max-drop 0.1 --certify 0.9",
    ROWS + "--max-drop 0.1 --precision int8",
)
conflict(
    CERTIFICATE,
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9 --macs 50%",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9",
    ROWS + "--method taylor --max-drop 0.1 --macs 50%",
)
conflict(
    "config.steps Heads.certify rule",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9 --keep 1",
    ROWS + "--method taylor --max-drop 0.1 --certify 0.9",
    ROWS + "--method taylor --max-drop 0.1 --keep 1",
)

SERVE = "config.request ServeRequest."
conflict(SERVE + "_has_a_name invalid-value", EXPORT + "--name a/b", EXPORT + "--name a-b_c.d1")
conflict(
    SERVE + "engine rule",
    EXPORT + "--engine engine.plan --backend onnxruntime",
    EXPORT + "--engine engine.plan",
    EXPORT + "--backend onnxruntime",
)
conflict(
    SERVE + "name rule",
    EXPORT + "--text-columns text",
    EXPORT + "--text-columns text --data rows.tsv",
    EXPORT,
)
conflict(
    SERVE + "gpus rule",
    EXPORT + "--gpus 0 --device cpu",
    EXPORT + "--device cpu",
    EXPORT + "--gpus 0",
)

TRAIN = "train out --data rows.tsv "
FIELDS = "config.request Training._fields_agree "
conflict(FIELDS + "contradiction", TRAIN + "--hidden 30 --heads 4", TRAIN + "--hidden 32 --heads 4")
conflict(
    FIELDS + "contradiction #2",
    TRAIN + "--learning-rate 0.001 --final-learning-rate 0.01",
    TRAIN + "--learning-rate 0.001 --final-learning-rate 0.0001",
)
conflict(
    "config.request Training.vocabulary rule", TRAIN + "--level character --vocabulary 40", TRAIN + "--level character"
)

GENERATE = "generate model "
REQUEST = "config.request GenerateRequest."
conflict(
    REQUEST + "prompt rule",
    GENERATE + "--prompt one --batch-file rows.tsv",
    GENERATE + "--prompt one",
    GENERATE + "--batch-file rows.tsv",
)
conflict(
    REQUEST + "batch_size rule",
    GENERATE + "--prompt one --batch-size 2",
    GENERATE + "--batch-file rows.tsv --batch-size 2",
    GENERATE + "--prompt one",
)
conflict(
    REQUEST + "name rule",
    GENERATE + "--prompt one --beams 2 --top-p 0.5",
    GENERATE + "--prompt one --beams 2",
    GENERATE + "--prompt one --top-p 0.5",
)
conflict(
    REQUEST + "seed rule",
    GENERATE + "--prompt one --seed 1",
    *(GENERATE + f"--prompt one --seed 1 --{flag}" for flag in ("temperature 0.7", "top-p 0.9", "top-k 5")),
    GENERATE + "--prompt one",
)
