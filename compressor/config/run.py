"""What a run is asked for: one frozen object. A flag of `compress run` and a key of a recipe file are one field."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from compressor.errors import UsageError, nearest

FILE_NAME = "compress.toml"
"""The recipe that is read from the model folder where none is named."""


def _listed(value: Any) -> Any:
    """`1,8` of a flag as the list that a recipe file writes; one value as a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value if isinstance(value, (list, tuple)) else [value]


def _table(value: Any) -> Any:
    """`tau_ini=100,cooldown=0.5` of a flag as the table that a recipe file writes."""
    if not isinstance(value, str):
        return value
    table = dict[str, Any]()
    for part in _listed(value):
        name, sign, text = (piece.strip() for piece in part.partition("="))
        if not sign:
            raise ValueError("not name=value, divided by commas")
        if name in table:
            raise ValueError(f"{name} is there twice; leave one out")
        try:
            table[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            table[name] = text
    return table


def _share(value: Any) -> Any:
    """`90%` of a flag as the number that a recipe file writes."""
    try:
        share = float(value.removesuffix("%")) / 100 if isinstance(value, str) and "%" in value else float(value)
        if isinstance(value, bool):
            raise TypeError
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError("no share; give a number from 0 to 1, or 90%") from error
    if not 0.0 <= share <= 1.0:
        raise ValueError("out of range; give a share from 0 to 1, or 90%")
    return share


def _count_or_share(value: Any) -> Any:
    text = str(value).strip()
    try:
        number = float(text[:-1]) if text.endswith("%") else int(text)
    except ValueError as error:
        raise ValueError("neither a count nor a share; give a number such as 36, or 50%") from error
    if number < 0 or (text.endswith("%") and not number <= 100):
        raise ValueError("out of range; give a count of heads from 0 up, or a share from 0% to 100%")
    return text if text.endswith("%") else number


def _place(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"local(:[1-9]\d*)?|(?!local:)(\[.+\]|[^:/\s]+):\d{1,5}", value):
        raise ValueError("no place for workers; say local, local:4 for four of them, or HOST:PORT of a Ray cluster")
    return value


def _maps(path: Path) -> Path:
    """Maps lie under one name in the folder of a run."""
    return path / "maps.safetensors" if path.is_dir() else path


def _block_size(value: int) -> int:
    if value != 1 and (value < 8 or value % 8):
        raise ValueError("no size of a block; give a multiple of 8 such as 64, or 1 for single entries")
    return value


Keep = Annotated[int | str, BeforeValidator(_count_or_share)]
Place = Annotated[str, BeforeValidator(_place)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Method = Literal[
    "dsp", "dsp-pipelined", "ste", "hard-concrete", "bin-concrete", "taylor", "astar", "local", "global", "random"
]
SEARCH_METHODS = ("taylor", "astar", "local", "global", "random")
"""Methods that evaluate subsets and can work by a budget (`max_drop`) in place of a count (`keep`)."""
PENALISED_METHODS = ("hard-concrete", "bin-concrete")
"""Gates that a penalty closes: without a count (`keep`), as many heads stay as it leaves open."""
Share = Annotated[float, BeforeValidator(_share)]
Prune = Annotated[dict[Literal["bidirectional", "causal", "cross"], Share], BeforeValidator(_table)]
BlockSize = Annotated[int, AfterValidator(_block_size)]
OF_BLOCKS = (
    *("block_size", "maps", "watch_rows", "random_blocks", "count_causal_zeros", "weigh_by_rows", "empty_rows"),
    *("everywhere", "entmax", "restart"),
)
OF_TENSORRT = ("workspace", "timing_cache", "hardware_compatible", "version_compatible")
OF_BUILDING = ("target", "precision", "provider", "threads", "kernel", *OF_TENSORRT, "batch", "seq", "seconds")
"""What decides how a graph is built and timed; `compress build` takes these."""
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), BeforeValidator(_listed)]
Options = Annotated[dict[str, Any], BeforeValidator(_table)]


def field_of(group: str, says: str, default: Any = None) -> Any:
    """A field with what help says of it, and the heading that it stands under."""
    return Field(default=default, description=says, json_schema_extra={"group": group})


class Recipe(BaseModel):
    """Everything that decides what a run computes. Frozen, and validated where it is made.

    Raises:
        pydantic.ValidationError: a field is out of its range, or two fields contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    model: Path = Field(description="the model folder", json_schema_extra={"group": "Model"})
    task: str | None = field_of("Model", "what the model is for, where its class does not say it: causal-lm, ...")
    allow_pickle: bool = field_of("Model", "load pickled weights, which can run code", False)
    trust_remote_code: bool = field_of("Model", "run the Python files that the model folder brings", False)

    data: str | None = field_of("Data", "rows to learn from: a TSV, CSV or JSONL file, or a Hugging Face data set")
    eval_data: str | None = field_of("Data", "rows that choices are made on")
    test_data: str | None = field_of("Data", "rows that are reported on")
    text_columns: Names = field_of("Data", "columns that hold the text, in order; else found by name", ())
    label_column: str | None = field_of("Data", "column that holds the label; else found by name")
    metric: str | None = field_of("Data", "what the task is scored by; else the task's own")
    max_length: Annotated[int, Field(ge=1)] = field_of("Data", "longest row in tokens; longer ones are cut", 128)
    stride: Annotated[int, Field(ge=0)] = field_of(
        "Data", "tokens that the windows of a context share where it is longer (question answering)", 128
    )

    plan: Path | None = field_of("Heads", "a plan.json to follow; nothing is learned then")
    method: Method = field_of("Heads", "how the heads are chosen", "dsp")
    keep: Keep | None = field_of("Heads", "heads to keep over the whole model: a count (36) or a share (50%)")
    guarantee: Annotated[float, Field(gt=0, lt=1)] | None = field_of(
        "Heads", "a search takes only heads whose drop is certified, with this confidence (0.95), on unseen rows"
    )
    ray: Place | None = field_of(
        "Heads", "spread a search with Ray: local, local:4 for four workers, or HOST:PORT of a cluster"
    )
    options: Options = field_of("Heads", "options of the method: name=value, divided by commas", {})
    epochs: Annotated[float, Field(gt=0)] | None = field_of(
        "Heads", "passes over the rows to learn from; else 3, or 1 for dsp-pipelined"
    )
    steps: Annotated[int, Field(ge=1)] | None = field_of("Heads", "optimizer steps, in place of epochs")
    batch_size: Annotated[int, Field(ge=1)] = field_of("Heads", "rows a step and process", 32)
    learning_rate: Annotated[float, Field(gt=0)] = field_of("Heads", "peak learning rate of the model", 5e-5)
    seed: Annotated[int, Field(ge=0)] = field_of("Heads", "seed of everything that is drawn", 0)

    blocks: Share | None = field_of(
        "Blocks", "share of the blocks of every attention map to drop (0.9), those of least attention"
    )
    prune: Prune = field_of(
        "Blocks", "the same by kind of attention, which goes before blocks: bidirectional=0.9,causal=0.9,cross=0", {}
    )
    block_size: BlockSize = field_of("Blocks", "positions along a block's side, a multiple of 8; 1: single entries", 64)
    maps: Annotated[Path, AfterValidator(_maps)] | None = field_of(
        "Blocks", "attention maps to cut from, or the folder of the run that has them; else those of the rows"
    )
    watch_rows: Annotated[int, Field(ge=1)] = field_of(
        "Blocks", "training rows that the attention maps are averaged over, at most", 2000
    )
    random_blocks: bool = field_of("Blocks", "drop blocks drawn at random, to compare with", False)
    count_causal_zeros: bool = field_of(
        "Blocks", "count what causality hides among what goes, as attention pruning's own code does", False
    )
    weigh_by_rows: bool = field_of(
        "Blocks", "weigh pairs of positions by how many rows have them: short rows keep more", False
    )
    empty_rows: bool = field_of(
        "Blocks", "let a row of blocks lose every one: in that head its queries then attend to nothing", False
    )
    everywhere: bool = field_of("Blocks", "mask every site, even where that is no faster on this machine", False)
    entmax: bool = field_of(
        "Blocks", "cut from sharper maps, of a model that learned with entmax in place of softmax", False
    )
    restart: bool = field_of(
        "Blocks",
        "learn with the masks from MODEL's weights, where heads were learned before; else on from there",
        False,
    )

    target: Literal["ort", "trt"] = field_of("Engine", "the runtime to build for", "ort")
    precision: Literal["fp32", "fp16", "bf16"] = field_of("Engine", "numbers that the engine computes in", "fp32")
    provider: Literal["cpu", "cuda"] | None = field_of("Engine", "where it runs; else CUDA where there is one")
    threads: Annotated[int, Field(ge=1)] | None = field_of("Engine", "threads of the engine; else one a core")
    kernel: Annotated[Path, AfterValidator(Path.absolute)] | None = field_of(
        "Engine", "library of compress kernel, for block-sparse attention in ONNX Runtime on the CPU; else plain ONNX"
    )
    workspace: Annotated[int, Field(ge=1)] | None = field_of(
        "Engine", "MiB of the GPU that TensorRT may work in while it builds; else all that are free"
    )
    timing_cache: Path | None = field_of(
        "Engine", "file that TensorRT's timings are kept in and taken from; else one in the user's cache"
    )
    hardware_compatible: bool = field_of("Engine", "a TensorRT engine for other GPUs too, from Ampere on", False)
    version_compatible: bool = field_of("Engine", "a TensorRT engine for later versions too", False)
    opset: Literal[18, 23] = field_of("Engine", "ONNX operator set of the exported graph", 18)
    attention: Literal["eager", "sdpa"] = field_of("Engine", "how attention is written into the graph", "eager")

    max_drop: Annotated[float, Field(ge=0)] | None = field_of(
        "Measuring",
        "the run fails if the metric gets worse by more than this, in its own unit (0.01 is a point of accuracy); a"
        " search without --keep drops as many heads as it allows",
    )
    batch: Sizes = field_of("Measuring", "batch sizes to time, divided by commas", (1, 8))
    seq: Sizes | None = field_of(
        "Measuring",
        "lengths to time, in tokens, divided by commas; else 128, or the most that the model takes; for masks the"
        " length of the longest row",
    )
    seconds: Annotated[float, Field(gt=0)] = field_of(
        "Measuring", "about how long to time each size; never fewer than ten pairs of blocks", 10.0
    )

    out: Path = field_of("Output", "folder to write", Path("out"))
    force: bool = field_of(
        "Output", "replace the output folder, or what an interrupted run of another recipe left", False
    )

    @pydantic.field_validator("opset", mode="before")
    @classmethod
    def _a_flag_is_text(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @pydantic.model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.data is None and self.plan is None and self.keep is not None and not self._folder_plan.exists():
            raise ValueError(f"keep {self.keep}: there are no rows to learn from; give them (data), or a plan (plan)")
        if self.target == "trt" and self.provider == "cpu":
            raise ValueError("provider cpu: TensorRT runs on a GPU; leave it out, or choose ort (target)")
        if self.kernel is not None and (self.target == "trt" or self.provider == "cuda"):
            raise ValueError(f"kernel {self.kernel}: is for ONNX Runtime on the CPU; leave it out")
        if self.max_drop is not None and not self.scored:
            raise ValueError(f"max_drop {self.max_drop:g}: there are no rows to score; give them (data)")
        if self.drops_blocks and self.data is None:
            raise ValueError("blocks: there are no rows to watch and to learn from; give them (data)")
        if self.drops_blocks and self.plan_file is not None:
            raise ValueError(f"blocks: {self.plan_file} says what stays; leave one of them out")
        if self.maps is not None and self.entmax:
            raise ValueError(f"maps {self.maps}, entmax: those maps are made already; leave one of them out")
        ranked = [name for name in ("weigh_by_rows", "entmax") if getattr(self, name)]
        if self.random_blocks and ranked:
            raise ValueError(f"random_blocks, {ranked[0]}: what is drawn has no rank; leave one of them out")
        if self.guarantee is not None and self.drops_blocks:
            raise ValueError(
                f"guarantee {self.guarantee:g}: certifies heads alone, not what blocks cost; leave one of them out"
            )
        learns = self.learns_heads and self.plan_file is None
        if learns and self.keep is None and self.method not in (*SEARCH_METHODS, *PENALISED_METHODS):
            of_blocks = ", or what share of the blocks goes (blocks)" if self.model_fields_set & {*OF_BLOCKS} else ""
            raise ValueError(f"{self.method} learns which heads to keep, not how many; say how many (keep){of_blocks}")
        if learns and self.keep is None and self.max_drop is None and self.method in SEARCH_METHODS:
            raise ValueError(
                f"{self.method} needs an end: how many heads to keep (keep), or what they may cost (max_drop)"
            )
        if self.ray is not None and self.method not in SEARCH_METHODS:
            raise ValueError(f"ray {self.ray}: spreads a search; name one of {', '.join(SEARCH_METHODS)} (method)")
        if self.guarantee is not None and (self.method not in SEARCH_METHODS or self.max_drop is None):
            raise ValueError(
                f"guarantee {self.guarantee:g}: certifies what a search may cost; name one of"
                f" {', '.join(SEARCH_METHODS)} (method) and the cost (max_drop)"
            )
        if self.guarantee is not None and self.keep is not None:
            raise ValueError(
                f"guarantee {self.guarantee:g}, keep {self.keep}: the guarantee decides how many heads go; leave one"
                " out"
            )
        return self

    @property
    def _folder_plan(self) -> Path:
        return self.model / "plan.json"

    @property
    def plan_file(self) -> Path | None:
        """The plan to follow: the one named, else the one in the model folder, else None."""
        if self.plan is not None:
            return self.plan
        return self._folder_plan if self._folder_plan.exists() else None

    @property
    def drops_blocks(self) -> bool:
        """Whether any block of an attention map is to go."""
        return bool(self.blocks) or any(self.prune.values())

    @property
    def asks_for_blocks(self) -> bool:
        """Whether anything is said of how many blocks go, be it none."""
        return self.blocks is not None or bool(self.prune)

    @property
    def learns_heads(self) -> bool:
        """Whether heads are chosen by learning: beside blocks, only if a number or another method is asked for."""
        if self.data is None:
            return False
        return (
            not self.asks_for_blocks
            or self.keep is not None
            or self.method != type(self).model_fields["method"].default
        )

    @property
    def scored(self) -> bool:
        """Whether any rows were given."""
        return any(rows is not None for rows in (self.data, self.eval_data, self.test_data))

    def learning_key(self, **more: str) -> str:
        """Hash of the fields that decide what is learned, and of `more` (what lies in the files that they name).

        Where it pays to mask is timed with the engine's own settings, so they count where blocks go.
        """
        groups = ("Model", "Data", "Heads", "Blocks")
        fields = {name for name, field in type(self).model_fields.items() if group_of(field) in groups}
        fields -= {"plan", "ray"}
        if self.keep is None and self.method in SEARCH_METHODS:  # then what heads may cost decides how many go
            fields.add("max_drop")
        if self.drops_blocks:
            fields |= {"provider", "precision", "threads", "batch", "seq"}
            for name, file in (("maps", self.maps), ("kernel", self.kernel)):
                if file is not None and file.is_file():
                    more[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        asked = {**self.model_dump(mode="json", include=fields), **more}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def group_of(field: pydantic.fields.FieldInfo) -> str:
    """The heading that a field stands under in `--help` and in the documents."""
    return str(field.json_schema_extra["group"])  # type: ignore[index]


def flag_of(name: str) -> str:
    """The flag of a field: `eval_data` is `--eval-data`."""
    return f"--{name.replace('_', '-')}"


def command_line(recipe: Recipe) -> str:
    """The command that asks for exactly this run, whatever recipe files lie about."""
    words = ["compress", "run", str(recipe.model), "--recipe", os.devnull]
    for name in Recipe.model_fields:
        value = getattr(recipe, name)
        if name == "model" or value == Recipe.model_fields[name].default:
            continue
        if name == "epochs" and recipe.steps is not None:
            continue  # steps are in place of epochs
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            words += [flag_of(name), _as_text(value)]
    return shlex.join(words)


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={_as_text(item)}" for name, item in value.items())
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def make(
    model: str | None,
    file: str | None,
    flags: Mapping[str, Any],
    *,
    decided: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe of one command: what a flag says, else what the file says, else the default.

    Args:
        model: the model folder; None where the file names it.
        file: a recipe file; None for `compress.toml` in the model folder, where there is one.
        flags: field name -> what its flag said.
        options: options of the method that have a flag of their own; they join those of `flags`, or of the file.
        decided: fields that neither may say; where there are rows and `keep` is one of them, all heads are kept.

    Raises:
        UsageError: the file does not read, a key is unknown or a value is out of its range; one line says which.
    """
    found = Path(file) if file else Path(model) / FILE_NAME if model else None
    if not model and not found:
        raise UsageError("no model folder was given; say compress MODEL, or --recipe FILE with a line model = ...")
    written: dict[str, Any] = {}
    if found and (file or found.is_file()):
        written = read(found)
    asked = {**written, **({"model": model} if model else {}), **flags}
    asked = {name: value for name, value in asked.items() if name not in decided}
    if "keep" in decided and "data" in asked:
        asked["keep"] = "100%"
    if "model" not in asked:
        raise UsageError(f"{found}: no model folder was given; say compress MODEL, or add a line model = ...")
    try:
        recipe = Recipe.model_validate(asked)
        return recipe.model_copy(update={"options": {**recipe.options, **options}}) if options else recipe
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        keys = set(written) - set(flags)
        name = str(first["loc"][0]) if first["loc"] else ""
        where = flag_of(name) if name in flags else f"{found}: {name}"
        said = _one_line(first, name, where)
        if not name:
            said = (f"{found}: " if said.split()[0].rstrip(":,") in keys else "") + _as_asked(said, keys)
        raise UsageError(said) from error


def _as_asked(said: str, keys: Set[str]) -> str:
    """A fault between fields, which it calls `keep 3` or `(keep)`: as flags, but for those that are a file's keys."""
    names = "|".join(Recipe.model_fields)
    mentioned = re.compile(rf"(?<=\()({names})(?=\))|(?:^|(?<=, ))({names})(?=(?: [^ :,]+)?[:,])")
    return mentioned.sub(lambda name: name[0] if name[0] in keys else flag_of(name[0]), said)


def read(path: Path) -> dict[str, Any]:
    """The fields that a recipe file gives. Paths in it are relative to its own folder.

    Raises:
        UsageError: it is missing, is not TOML, or has a key that is no field.
    """
    try:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such recipe; name a TOML file (--recipe)") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: not a recipe ({error}); mend the TOML") from error
    written = {name.replace("-", "_"): value for name, value in written.items()}
    for name, value in written.items():
        if name not in Recipe.model_fields:
            raise UsageError(f"{path}: unknown key {name}; {nearest(name, list(Recipe.model_fields))}")
        if isinstance(value, str) and _is_path(name, path.parent / value):
            written[name] = str(path.parent / value)
    return written


def _is_path(name: str, beside: Path) -> bool:
    """Rows are named by a path or by a data set's name on a hub: a path is one that is there."""
    paths = ("model", "plan", "maps", "kernel", "timing_cache", "out")
    return name in paths or (name in ("data", "eval_data", "test_data") and beside.exists())


def _one_line(error: Any, name: str, where: str) -> str:
    said = " ".join(str(error["msg"]).removeprefix("Value error, ").split())
    if error["type"] == "literal_error" and (known := re.findall(r"'([^']*)'", error["ctx"]["expected"])):
        said = f"unknown; {nearest(str(error['input']), known)}"
    if not name:
        return said
    hint = "" if ";" in said else f" ({Recipe.model_fields[name].description})"
    return f"{where} {error['input']!r}: {said[0].lower()}{said[1:]}{hint}"
