"""Teachers whose tokenizer makes other tokens of the same text are refused, with the part that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor
from compressor.errors import ErrorCode
from compressor.model_folder import load
from compressor.run.steps.distill import differing_tokenizer_part, require_same_interface
from tests import folders
from tests.faults import fails_with
from tests.run.distillation.distilled_runs import distilled_recipe
from tests.run.listeners import RecordingListener

TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}},
}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("model", {"type": "WordLevel", "unk_token": "[MASK]"}),
        ("post_processor", TEMPLATE),
    ],
)
def test_a_teacher_that_makes_other_tokens_is_refused(part: str, value: dict[str, Any], tmp_path: Path) -> None:
    student = load(folders.save(folders.bert(), tmp_path / "student"))
    file = folders.save(folders.bert(), tmp_path / "teacher") / "tokenizer.json"
    content = json.loads(file.read_text())
    content[part] = {**content[part], **value} if part == "model" else value
    file.write_text(json.dumps(content))
    teacher = load(file.parent)
    assert teacher.processor.get_vocab() == student.processor.get_vocab()
    with fails_with(ErrorCode.FILE_MISMATCH, field="teacher", path=file.parent, part=part):
        require_same_interface(teacher, student, compares_hidden=True)


def test_truncation_and_padding_do_not_matter(tmp_path: Path) -> None:
    teacher, student = (load(folders.save(folders.bert(), tmp_path / name)) for name in ("teacher", "student"))
    teacher.processor("the good film", truncation=True, max_length=3, padding="max_length")
    serialized = [json.loads(folder.processor.backend_tokenizer.to_str()) for folder in (teacher, student)]
    assert serialized[0]["truncation"] != serialized[1]["truncation"]
    assert serialized[0]["padding"] != serialized[1]["padding"]
    require_same_interface(teacher, student, compares_hidden=True)


def test_a_teacher_whose_outputs_are_not_finite_is_refused_before_the_export(inputs: Path, tmp_path: Path) -> None:
    model = load(inputs / "model")
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1e25)
    folders.save(model.model, tmp_path / "teacher")
    listener = RecordingListener()
    with fails_with(ErrorCode.NOT_FINITE, field="teacher", path=str(tmp_path / "teacher")):
        compressor.compress(distilled_recipe(inputs, tmp_path / "out", teacher=tmp_path / "teacher"), listener)
    assert not any("exporting" in stage for stage in listener.stages)


def test_slow_tokenizers_have_no_parts() -> None:
    assert differing_tokenizer_part(object(), folders.tokenizer()) is None
    assert differing_tokenizer_part(None, None) is None
