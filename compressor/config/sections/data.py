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
        "task, where the class of the model does not determine it; one of text-classification,"
        " multi-label-classification, regression, token-classification, question-answering, fill-mask,"
        " sentence-similarity, image-classification, translation, causal-lm, or a custom task"
        " (package.module:Class, or an entry point)",
        decides_plan=True,
        is_basic=True,
    )
    allow_pickle: bool = config_field(
        MODEL, "load pickled weights, which can run code", False, decides_plan=True, runs_code=True
    )
    trust_remote_code: bool = config_field(
        MODEL, "run the Python files of the model folder", False, decides_plan=True, runs_code=True
    )
    example_inputs: Path | None = config_field(
        MODEL,
        ".npz file with one array [example, ...] per input, for a model whose inputs cannot be generated",
        is_path=True,
    )


ROW_SOURCES = ("data", "unlabelled_data", "eval_data", "test_data")
"""Fields that name rows: a file, a folder, or a data set of a hub, which is no path."""


class RowsConfig(Config):
    """The training, evaluation and test rows, and how they are read."""

    data: Rows = config_field(
        DATA,
        "training examples: a file, folder or Hugging Face data set; a file is TSV, CSV, JSONL, text, CoNLL or"
        " Parquet, a folder has such files or images, or save_to_disk of datasets wrote it",
        decides_plan=True,
        is_basic=True,
    )
    unlabelled_data: Rows = config_field(
        DATA,
        "further training examples, whose labels are not read, to choose units, refit weights and distill: a"
        " source as in --data, e.g. a text file",
        decides_plan=True,
    )
    eval_data: Rows = config_field(
        DATA, "evaluation examples, on which choices are made", decides_plan=True, is_basic=True
    )
    test_data: Rows = config_field(
        DATA, "test examples, on which the metric is reported", decides_plan=True, is_basic=True
    )
    text_columns: Names = config_field(
        DATA, "columns of the text, in order; default: recognized by name", (), decides_plan=True
    )
    label_column: str | None = config_field(DATA, "column of the label; default: recognized by name", decides_plan=True)
    image_column: str | None = config_field(
        DATA, "column of images, or of paths of image files; default: recognized by name", decides_plan=True
    )
    metric: str | None = config_field(DATA, "metric of the task; default: its main metric", decides_plan=True)
    max_length: Count = config_field(
        DATA, "maximum length of an example in tokens; longer ones are cut", 128, decides_plan=True, is_basic=True
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
