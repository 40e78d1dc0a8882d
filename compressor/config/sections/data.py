"""The model, and the rows."""

from __future__ import annotations

from pathlib import Path

from compressor.config.fields import Config, config_field
from compressor.config.sections.headings import DATA, MODEL
from compressor.config.values import Count, Names, Natural, Rows


class SourceConfig(Config):
    """The model to compress."""

    model: Path = config_field(MODEL, "the model folder", required=True, decides_plan=True, is_path=True)
    task: str | None = config_field(
        MODEL,
        "task of the model, where its class does not determine it: text-classification, multi-label-classification,"
        " regression, token-classification, question-answering, fill-mask, sentence-similarity, image-classification,"
        " translation or causal-lm; or a custom task, package.module:Class or the name of an entry point",
        decides_plan=True,
    )
    allow_pickle: bool = config_field(
        MODEL, "load pickled weights, which can run code", False, decides_plan=True, runs_code=True
    )
    trust_remote_code: bool = config_field(
        MODEL, "run the Python files in the model folder", False, decides_plan=True, runs_code=True
    )
    example_inputs: Path | None = config_field(
        MODEL,
        "an .npz file with one array [row, ...] per input, for a model whose inputs cannot be made up",
        is_path=True,
    )


ROW_SOURCES = ("data", "unlabelled_data", "eval_data", "test_data")
"""Fields that name rows: a file, a folder, or a data set of a hub, which is no path."""


class RowsConfig(Config):
    """The training, evaluation and test rows, and how they are read."""

    data: Rows = config_field(
        DATA,
        "training rows: a TSV, CSV, JSONL, text, CoNLL or Parquet file, a folder of such files or of images, a"
        " folder that save_to_disk of datasets wrote, or a data set of Hugging Face",
        decides_plan=True,
    )
    unlabelled_data: Rows = config_field(
        DATA,
        "further training rows, used without labels to choose units, to refit weights and to distill: such a file,"
        " folder or data set, e.g. a text file",
        decides_plan=True,
    )
    eval_data: Rows = config_field(DATA, "evaluation rows, on which choices are made", decides_plan=True)
    test_data: Rows = config_field(DATA, "test rows, on which the metric is reported", decides_plan=True)
    text_columns: Names = config_field(
        DATA, "columns of the text, in order; default: recognized by name", (), decides_plan=True
    )
    label_column: str | None = config_field(DATA, "column of the label; default: recognized by name", decides_plan=True)
    image_column: str | None = config_field(
        DATA, "column of images, or of paths of image files; default: recognized by name", decides_plan=True
    )
    metric: str | None = config_field(DATA, "metric of the task; default: the task's main metric", decides_plan=True)
    max_length: Count = config_field(
        DATA, "maximum length of a row in tokens; longer rows are cut", 128, decides_plan=True
    )
    stride: Natural = config_field(
        DATA, "tokens shared by consecutive windows of a long context (question answering)", 128, decides_plan=True
    )

    @property
    def available(self) -> bool:
        """Whether any rows are configured."""
        return bool(self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """The files, folders and data sets that are configured."""
        every = (getattr(self, name) for name in ROW_SOURCES)
        return tuple(source for source in every if source is not None)
