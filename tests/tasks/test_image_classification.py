"""Image classification: rows of folders, files and data sets, its metrics, and images that cannot be used."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from transformers import AutoImageProcessor

from compressor.errors import ErrorCode, TargetMissingError, UsageError
from compressor.model_folder import ModelFolder, load
from compressor.models.forwards import tensors_of
from compressor.results import NoteCode
from compressor.tasks import Data, open_data
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.pictures import CLASSES, SIZE, classifier, picture, png, save_classifier, truncate, vit, write_folder
from tests.tasks.rows import jsonl, tsv

COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A ViT whose classes are those of the images."""
    return classifier(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four images of each of three classes."""
    return write_folder(tmp_path_factory.mktemp("images"), COUNT)


def read(folder: ModelFolder, source: Path | str, **fields: Any) -> Data:
    """The rows of a source, for every purpose."""
    name = str(source)
    return open_data(rows_config(name, name, name, **fields), folder)


def test_subfolders_are_classes(folder: ModelFolder, images: Path) -> None:
    data = read(folder, images)
    assert data.test["labels"] == [0] * 4 + [1] * 4 + [2] * 4
    assert data.test["file"][0] == "bright/000.png"
    batch = data.task.collate([data.test[0], data.test[5]])
    assert batch["pixel_values"].shape == (2, 3, SIZE, SIZE)
    processed = folder.processor(images=picture(0), return_tensors="pt")["pixel_values"][0]
    assert np.array_equal(batch["pixel_values"][0], processed)
    assert data.task.reference_text(data.test[5]) == "dark"


def test_a_table_beside_a_folder_of_images_has_the_rows(folder: ModelFolder, images: Path, tmp_path: Path) -> None:
    paths = sorted(images.rglob("*.png"))[:6]
    (tmp_path / "images").mkdir()
    for number, path in enumerate(paths):
        shutil.copy(path, tmp_path / "images" / f"{number}.png")
    rows = [f"images/{number}.png\t{path.parent.name}" for number, path in enumerate(paths)]
    tsv(tmp_path / "train.tsv", *rows, header="image\tlabel")
    assert open_data(rows_config(str(tmp_path)), folder).train["labels"]


def test_names_of_classes_are_learned(images: Path, tmp_path: Path) -> None:
    unnamed = classifier(tmp_path, model=vit(names=("LABEL_0", "LABEL_1", "LABEL_2")))
    assert read(unnamed, images).test["labels"] == [0] * 4 + [1] * 4 + [2] * 4
    assert unnamed.config.id2label == dict(enumerate(CLASSES))


def forms(folder: Path, images: Path) -> dict[str, Path | str]:
    """The images in every form of rows, in the order of the folder."""
    paths = sorted(images.rglob("*.png"))
    contents = [path.read_bytes() for path in paths]
    labels = [path.parent.name for path in paths]
    cells = [{"bytes": content, "path": path.name} for content, path in zip(contents, paths, strict=True)]
    rows = datasets.Dataset.from_dict(
        {"image": cells, "label": [CLASSES.index(label) for label in labels]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}),
    )
    rows.save_to_disk(str(folder / "saved"))
    rows.to_parquet(str(folder / "rows.parquet"))
    pyarrow.parquet.write_table(pa.table({"img": contents, "label": labels}), folder / "plain.parquet")
    shutil.copytree(images, folder / "files")
    relative = [f"files/{label}/{path.name}" for path, label in zip(paths, labels, strict=True)]
    cells_of_paths = [{"file_name": path, "label": label} for path, label in zip(relative, labels, strict=True)]
    lines = [f"{label}\t{path}" for path, label in zip(relative, labels, strict=True)]
    return {
        "saved": folder / "saved",
        "parquet": folder / "rows.parquet",
        "binary": folder / "plain.parquet",
        "jsonl": jsonl(folder / "rows.jsonl", *cells_of_paths),
        "tsv": tsv(folder / "rows.tsv", *lines, header="label\tpath"),
    }


def test_every_form_of_rows_holds_the_same_images(folder: ModelFolder, images: Path, tmp_path: Path) -> None:
    expected = read(folder, images)
    for name, source in forms(tmp_path, images).items():
        data = read(folder, source)
        assert data.eval_hash == expected.eval_hash, name
        assert np.array_equal(pixels(data), pixels(expected)), name
        assert data.test["file"][0] == {"binary": "", "saved": "000.png", "parquet": "000.png"}.get(
            name, "bright/000.png"
        )


def pixels(data: Data) -> np.ndarray:
    return data.task.collate(list(data.test))["pixel_values"]


def test_subfolders_named_after_splits_are_splits(folder: ModelFolder, images: Path, tmp_path: Path) -> None:
    for split, count in (("train", 12), ("validation", 6), ("test", 3)):
        write_folder(tmp_path / split, count)
    data = open_data(rows_config(str(tmp_path)), folder)
    assert [len(rows) for rows in (data.train, data.eval, data.test)] == [12, 6, 3]


def test_images_without_labels_serve_where_none_are_needed(folder: ModelFolder, images: Path, tmp_path: Path) -> None:
    plain = write_folder(tmp_path / "plain", 5, labelled=False)
    data = open_data(rows_config(str(plain), None, str(images)), folder, drawn_rows=5)
    assert (len(data.train), data.train["labels"][0]) == (4, 0)
    with fails_with(ErrorCode.COLUMN_MISSING, field="label_column"):
        read(folder, plain)


def test_images_of_several_classes_have_their_labels_and_metrics(images: Path, tmp_path: Path) -> None:
    model = vit()
    model.config.problem_type = "multi_label_classification"
    folder = load(save_classifier(tmp_path / "model", model))
    files = sorted(images.rglob("*.png"))[:6]
    sets = [[CLASSES[index] for index in range(3) if number >> index & 1] for number in range(6)]
    rows = jsonl(
        tmp_path / "rows.jsonl",
        *({"image": str(file), "labels": names} for file, names in zip(files, sets, strict=True)),
    )
    data = read(folder, rows)
    batch = data.task.collate(list(data.test))
    assert batch["labels"].tolist() == [[float(number >> index & 1) for index in range(3)] for number in range(6)]
    assert torch.isfinite(folder.model(**tensors_of(batch)).loss)
    assert {metric.name for metric in data.task.metrics} == {"micro-f1", "macro-f1", "map"}
    with torch.no_grad():
        logits = folder.model(pixel_values=tensors_of(batch)["pixel_values"]).logits.numpy()
    assert data.task.per_example(logits, batch["labels"])[:, :3].tolist() == (logits >= 0).tolist()


def test_metrics(folder: ModelFolder, images: Path, tmp_path: Path) -> None:
    data = read(classifier(tmp_path, model=vit(7)), images, metric="top5")
    logits = np.array([[9.0, 8, 7, 6, 5, 4, 3], [3.0, 4, 5, 6, 7, 8, 9], [0.0, 0, 0, 0, 0, 0, 1]])
    statistics = data.task.per_example(logits, np.array([4, 1, 6]))
    assert statistics.tolist() == [[1.0], [0.0], [1.0]]
    assert data.task.score(statistics) == pytest.approx(2 / 3)
    assert data.task.constant_score(statistics) is None
    assert data.task.answer_texts(logits, np.array([4, 1, 6])) == ["bright", "class 6", "class 6"]
    accuracy = read(folder, images).task
    assert accuracy.score(accuracy.per_example(logits[:, :3], np.array([0, 1, 2]))) == pytest.approx(1 / 3)
    with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="metric"):
        read(folder, images, metric="top5")


@pytest.mark.parametrize("content", [b"no image", b"", png(0)[:40]])
def test_files_that_are_no_images_are_named(folder: ModelFolder, tmp_path: Path, content: bytes) -> None:
    write_folder(tmp_path, 6)
    damaged = tmp_path / "dark" / "damaged.png"
    damaged.write_bytes(content)
    with fails_with(ErrorCode.INVALID_ROWS, row=5, column="image", path=str(damaged)) as caught:
        pixels(read(folder, tmp_path))
    assert f"row 5: 'image' ({damaged})" in str(caught.value)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
@pytest.mark.parametrize("split", ["data", "eval_data", "test_data"])
def test_images_that_end_early_are_named_when_rows_are_read(
    split: str, image_format: str, folder: ModelFolder, images: Path, tmp_path: Path
) -> None:
    write_folder(tmp_path, 6)
    truncated = tmp_path / "grey" / "002.png"
    truncate(truncated, image_format)
    sources = dict.fromkeys(("data", "eval_data", "test_data"), str(images)) | {split: str(tmp_path)}
    with fails_with(ErrorCode.INVALID_ROWS, row=5, column="image", path=str(truncated)):
        open_data(rows_config(**sources), folder)


def test_images_of_rows_that_may_not_be_drawn_are_not_decoded(
    folder: ModelFolder, images: Path, tmp_path: Path
) -> None:
    write_folder(tmp_path, 6)
    truncate(tmp_path / "grey" / "002.png", "PNG")
    data = open_data(rows_config(str(tmp_path), str(images), str(images)), folder, drawn_rows=2)
    with fails_with(ErrorCode.INVALID_ROWS, row=5):
        data.task.check_files(data.train)


class SquareOnly:
    """An image processor that refuses images that are not square, or leaves them in their size.

    Args:
        processor: processes the other images.
        refuses: whether it refuses images.
    """

    def __init__(self, processor: Any, *, refuses: bool) -> None:
        self._processor, self._refuses = processor, refuses
        self.to_dict = processor.to_dict

    def __call__(self, images: Any, return_tensors: str) -> Any:
        width, height = images.size
        if width == height:
            return self._processor(images=images, return_tensors=return_tensors)
        if self._refuses:
            raise ValueError("not square")
        return {"pixel_values": torch.zeros(1, 3, height, width)}


@pytest.mark.parametrize("refuses", [True, False])
def test_an_image_of_which_the_processor_makes_no_pixels_of_the_size_is_named(
    refuses: bool, folder: ModelFolder, tmp_path: Path
) -> None:
    for number in range(6):
        PIL.Image.new("RGB", (8, 8 if number != 4 else 7)).save(tmp_path / f"{number}.png")
    rows = tsv(tmp_path / "rows.tsv", *(f"{CLASSES[n % 3]}	{n}.png" for n in range(6)), header="label	photo")
    processor = SquareOnly(folder.processor, refuses=refuses)
    data = read(replace(folder, processor=processor), rows, image_column="photo")
    assert data.task.collate([data.test[0]])["pixel_values"].shape == (1, 3, SIZE, SIZE)
    with fails_with(ErrorCode.INVALID_ROWS, row=5, column="photo", path=str(tmp_path / "4.png")) as caught:
        pixels(data)
    assert rows in str(caught.value)


def test_files_that_are_not_read_are_counted(folder: ModelFolder, tmp_path: Path) -> None:
    images = write_folder(tmp_path, 6)
    assert NoteCode.FILES_SKIPPED not in {note.code for note in read(folder, images).notes}
    (tmp_path / "only").mkdir()
    for name in ("bright/z.avif", "only/y.avif", "only/x.heic", ".hidden", "grey/.hidden.avif"):
        (tmp_path / name).write_bytes(png(0))
    (note,) = [note for note in read(folder, images).notes if note.code is NoteCode.FILES_SKIPPED]
    assert {"2 .avif", "1 .heic"} <= {part.strip(" ;") for part in re.split("[:,;]", note.text)}


def test_bad_rows_are_refused(folder: ModelFolder, images: Path, tmp_path: Path) -> None:
    missing = tsv(tmp_path / "missing.tsv", "bright\ta.png", "dark\tb.png", header="label\timage")
    with fails_with(ErrorCode.INVALID_ROWS, row=1, column="image", path=str(tmp_path / "a.png")):
        read(folder, missing)
    empty = tsv(tmp_path / "empty.tsv", f"bright\t{images}/bright/000.png", "dark\t", header="label\timage")
    with fails_with(ErrorCode.INVALID_ROWS, row=2, column="image"):
        read(folder, empty)
    with fails_with(ErrorCode.COLUMN_MISSING, field="image_column"):
        read(folder, tsv(tmp_path / "text.tsv", "bright\ta", "dark\tb"))
    with fails_with(ErrorCode.INVALID_ROWS, column="label"):
        read(folder, jsonl(tmp_path / "numbers.jsonl", {"label": 0}, {"label": 1}), image_column="label")
    with fails_with(ErrorCode.FILE_MISSING):
        (tmp_path / "nothing").mkdir()
        read(folder, tmp_path / "nothing")
    mixed = write_folder(tmp_path / "beside", 6)
    (mixed / "lost.png").write_bytes(png(0))
    with fails_with(ErrorCode.INVALID_ROWS, path=mixed / "lost.png"):
        read(folder, mixed)


def test_labels_outside_the_classes_are_refused(images: Path, tmp_path: Path) -> None:
    named = classifier(tmp_path, model=vit(names=("bright", "dark", "red")))
    with fails_with(ErrorCode.LABEL_MISMATCH, value="grey"):
        read(named, images)


def test_folders_without_a_usable_processor_are_refused(images: Path, tmp_path: Path) -> None:
    bare = classifier(tmp_path / "bare")
    (bare.path / "preprocessor_config.json").unlink()
    with fails_with(ErrorCode.FILE_MISSING, path=bare.path / "preprocessor_config.json"):
        read(load(bare.path), images)
    with fails_with(ErrorCode.FILE_MISMATCH, field="size"):
        classifier(tmp_path / "large", size={"height": 32, "width": 32})
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="size"):
        classifier(tmp_path / "any", do_resize=False)
    (bare.path / "preprocessor_config.json").write_text("{")
    with fails_with(ErrorCode.FILE_UNREADABLE):
        load(bare.path)


def test_a_missing_library_of_a_processor_is_named(images: Path, tmp_path: Path) -> None:
    path = save_classifier(tmp_path)

    def from_pretrained(*arguments: Any, **options: Any) -> None:
        raise ImportError("ViTImageProcessor requires the Torchvision library")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoImageProcessor, "from_pretrained", from_pretrained)
        loaded = load(path)
        with fails_with(ErrorCode.PACKAGE_MISSING, TargetMissingError, path=path) as caught:
            read(loaded, images)
    assert "Torchvision" in str(caught.value)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA", "CMYK", "I;16", "1"])
def test_images_of_every_mode_are_read_in_colour(folder: ModelFolder, tmp_path: Path, mode: str) -> None:
    suffix = "tiff" if mode == "CMYK" else "png"
    for number, name in enumerate(CLASSES):
        (tmp_path / name).mkdir()
        PIL.Image.new(mode, (5 + number, 1)).save(tmp_path / name / f"picture.{suffix}")
    assert pixels(read(folder, tmp_path)).shape == (3, 3, SIZE, SIZE)
