"""Kept outputs of a teacher: each row is computed once, whatever its padding, and refusals fall back to computing."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from compressor.models.pooled_encoder import SentenceEncoder
from compressor.store import Store
from compressor.training.distillation import Distillation
from compressor.training.teacher_outputs import KeptOutputs, Outputs
from tests import folders, zoo
from tests.quick_cases import quick

ROWS = [[3, 5, 7], [4, 6], [8, 9, 10, 11], [3, 5, 7, 2]]


def batch(*numbers: int, padding: int = 0) -> dict[str, Tensor]:
    """Some of the rows, padded to the longest of them and `padding` further positions."""
    rows = [ROWS[number] for number in numbers]
    length = max(map(len, rows)) + padding
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(len(rows), dtype=torch.long)}


class Teacher:
    """Outputs that depend on the inputs of a row alone; counts how often each row is computed."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[int, ...]] = Counter()

    def __call__(self, inputs: Mapping[str, Tensor]) -> Outputs:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        self.rows.update(tuple(row[kept.bool()].tolist()) for row, kept in zip(ids, mask, strict=True))
        total = (ids * mask).sum(1).float()
        return {"logits": torch.stack([total, -total], 1), "hidden_states.0": torch.stack([ids, 2 * ids], 2).float()}


def kept(teacher: Teacher, folder: Path) -> KeptOutputs:
    return KeptOutputs(teacher, Store(folder, version=1), len(ROWS), sum(map(len, ROWS)))


def test_every_row_is_computed_once_whatever_its_padding(tmp_path: Path) -> None:
    teacher, direct = Teacher(), Teacher()
    outputs = kept(teacher, tmp_path)
    for inputs in (batch(0, 1), batch(1, 2, 0), batch(0, 0, padding=3), batch(3, 1, 2)):
        actual, expected = outputs(inputs), direct(inputs)
        mask = inputs["attention_mask"].bool()
        torch.testing.assert_close(actual["logits"], expected["logits"])
        torch.testing.assert_close(actual["hidden_states.0"][mask], expected["hidden_states.0"][mask])
        assert not actual["hidden_states.0"][~mask].any()
    assert set(teacher.rows.values()) == {1}
    assert len(teacher.rows) == len(ROWS)
    assert outputs.refusal is None


def test_a_later_run_computes_nothing_again(tmp_path: Path) -> None:
    first = kept(Teacher(), tmp_path)
    expected = first(batch(0, 1, 2, 3))
    first.close()
    teacher = Teacher()
    second = kept(teacher, tmp_path)
    second(batch(2))  # opens the file
    torch.testing.assert_close(second(batch(0, 1, 2, 3)), expected)
    assert sum(teacher.rows.values()) <= 1


@pytest.mark.parametrize("cause", ["disk", "range", "axes", "decoder", "processes"])
def test_outputs_that_cannot_be_kept_are_computed(cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cause == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    if cause == "processes":
        monkeypatch.setattr("compressor.training.teacher_outputs.process_count", lambda: 2)

    def teach(inputs: Mapping[str, Tensor]) -> Outputs:
        outputs = Teacher()(inputs)
        if cause == "range":
            outputs["logits"] = outputs["logits"] * 1e6
        if cause == "axes":
            outputs["hidden_states.0"] = outputs["hidden_states.0"][:, :1]
        return outputs

    outputs = KeptOutputs(teach, Store(tmp_path, version=1), len(ROWS), sum(map(len, ROWS)))
    for inputs in (batch(0, 1), batch(1, 2)):
        if cause == "decoder":
            inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
        if cause != "range":  # a number that is too large may be in any row
            assert outputs.obstacle(inputs) is not None
        torch.testing.assert_close(outputs(inputs), teach(inputs))
    assert outputs.refusal is not None


def test_what_has_no_obstacle_is_kept(tmp_path: Path) -> None:
    outputs = kept(Teacher(), tmp_path / "missing" / "folder")
    assert outputs.obstacle(batch(0, 1)) is None
    assert not list(tmp_path.iterdir()), "asking writes nothing"
    outputs(batch(0, 1))
    assert outputs.refusal is None


@pytest.mark.parametrize("family", quick(["bert", "gpt2", "vit", "bart"], ["bert", "vit"]))
def test_the_loss_is_that_of_computed_outputs(family: str, tmp_path: Path) -> None:
    model, inputs = zoo.FAMILIES[family](0)
    student, _ = zoo.FAMILIES[family](1)
    distillation = Distillation.of(model.eval(), ("logits",))
    rows: Any = next(iter(inputs.values()))
    keeping = distillation.keep_outputs(tmp_path, len(rows), rows.numel())
    expected = distillation.loss(student, inputs).item()
    losses = [keeping.loss(student, inputs).item() for _ in range(2)]
    assert losses == pytest.approx([expected] * 2, rel=5e-3)


def test_a_classifier_with_a_decoder_has_the_loss_of_computed_outputs(tmp_path: Path) -> None:
    """Its decoder reads the tokens of the encoder, whose kept outputs are zero where they are padding."""
    sizes: dict[str, Any] = {"d_model": 8, "vocab_size": 10, "max_position_embeddings": 16, "num_labels": 2}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 1, f"{side}_ffn_dim": 8}
    model = hf.BartForSequenceClassification(hf.BartConfig(**sizes)).eval()
    ids = torch.tensor([[0, 5, 6, 7, 2], [0, 5, 2, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": torch.tensor([0, 1])}
    distillation = Distillation.of(model, ("logits",))
    keeping = distillation.keep_outputs(tmp_path, len(ids), ids.numel())
    assert [keeping.loss(model, inputs).item() for _ in range(2)] == pytest.approx([0, 0], abs=1e-5)
    assert keeping.kept is not None
    assert keeping.kept.refusal is None


def test_outputs_that_are_stored_at_a_checkpoint_survive_the_process(tmp_path: Path) -> None:
    first = kept(Teacher(), tmp_path)
    expected = first(batch(0, 1))
    first.save()
    first(batch(2))
    first._lock.close()  # as the end of a process that is killed does
    teacher = Teacher()
    later = kept(teacher, tmp_path)
    later(batch(3))
    torch.testing.assert_close(later(batch(0, 1)), expected)
    assert list(teacher.rows) == [tuple(ROWS[3])]


def test_runs_with_another_teacher_do_not_share_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    losses = []
    for _ in range(2):
        student, teacher = folders.bert(), folders.bert()
        keeping = Distillation.of(teacher.eval(), ("logits",)).keep_outputs(tmp_path, 3, 20)
        expected = Distillation.of(teacher, ("logits",)).loss(student, batch(0, 1, 2)).item()
        losses.append((keeping.loss(student, batch(0, 1, 2)).item(), expected))
        assert keeping.kept is not None
        keeping.kept.close()
    assert all(loss == pytest.approx(expected, rel=5e-3) for loss, expected in losses)


def test_two_runs_do_not_write_into_one_file(tmp_path: Path) -> None:
    first, second, direct = kept(Teacher(), tmp_path), kept(Teacher(), tmp_path), Teacher()
    for outputs, numbers in ((first, (0,)), (second, (1,)), (first, (0, 2))):
        torch.testing.assert_close(outputs(batch(*numbers))["logits"], direct(batch(*numbers))["logits"])
    assert first.refusal is None
    assert second.refusal is not None
    first.close()
    third = kept(Teacher(), tmp_path)
    third(batch(0))
    assert third.refusal is None


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive"])
def test_an_index_that_is_damaged_counts_as_none(content: bytes, tmp_path: Path) -> None:
    first = kept(Teacher(), tmp_path)
    expected = first(batch(0, 1))
    first.close()
    (index,) = tmp_path.rglob("outputs.npz")
    index.write_bytes(content)
    teacher = Teacher()
    torch.testing.assert_close(kept(teacher, tmp_path)(batch(0, 1)), expected)
    assert sum(teacher.rows.values()) == 2


def test_a_disk_that_is_full_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    outputs = kept(Teacher(), tmp_path)
    torch.testing.assert_close(outputs(batch(0))["logits"], Teacher()(batch(0))["logits"])
    assert outputs.refusal is not None


def test_teachers_that_pool_or_rank_differently_do_not_share_outputs(tmp_path: Path) -> None:
    encoder = folders.bert_encoder().eval()
    width = encoder.config.hidden_size
    documents = [None, None, torch.eye(3, width), torch.ones(3, width)]
    models = [SentenceEncoder(encoder, "mean"), *(SentenceEncoder(encoder, "cls") for _ in documents[1:])]
    for model, texts in zip(models, documents, strict=True):
        model.documents = texts
        kept_outputs = Distillation.of(model.eval(), ("sentence_embedding",), hidden_weight=0.0).keep_outputs(
            tmp_path, 3, 20
        )
        kept_outputs.loss(model, batch(0, 1))
        assert kept_outputs.kept is not None
        kept_outputs.kept.close()
    assert len(list(tmp_path.iterdir())) == len(models)
