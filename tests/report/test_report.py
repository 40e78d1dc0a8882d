"""The sentences of the verdict, the files of a report, and its page as text."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from compressor.errors import InputError
from compressor.report import formatting, load, summary, write
from compressor.report.files import to_json
from compressor.report.html import render
from compressor.report.unit_maps import head_maps
from compressor.results import AnsweredRow, DropStatus, Refusal, Report, TaskCode
from graph_passes import Plan
from tests.report import reports

HOSTILE = (
    "</td></title></pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}{% raw %}$\\frac$[red]"
)


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        (
            "won",
            "36 of 72 heads kept, 7.8% fewer parameters (22.7M → 20.9M); 1.31× as fast as dense at batch 1, length 128",
        ),
        ("nothing learned", "Nothing was learned: the engine is the model as it is, all 72 heads and the same 22.7M"),
        ("not faster", "Not faster: 58 of 72 heads kept"),
        ("metric fell", "The metric fell too far: accuracy on the test rows 91.5 → 87.1, −4.4 points"),
        ("numbers differ", "Numbers differ: reference graph = shrunk graph fails on the compressed model with"),
        ("bare", "Speed not measured, no proof was run: 0 of 1 heads kept"),
    ],
)
def test_verdict_opens_with_the_most_important_outcome(name: str, opening: str) -> None:
    assert reports.REPORTS[name]().verdict.startswith(opening)


def test_verdict_of_a_successful_run_is_one_sentence() -> None:
    assert reports.report().verdict == (
        "36 of 72 heads kept, 7.8% fewer parameters (22.7M → 20.9M); "
        "1.31× as fast as dense at batch 1, length 128 (95% interval 1.28 to 1.34) "
        "and 1.36× at batch 8, length 128 (95% interval 1.33 to 1.39); "
        "accuracy on the test rows 91.5 → 90.9, −0.6 points (95% interval −1.6 to +0.4); all 6 proofs hold."
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"speeds": (reports.speed(1, 128, 4.0, 6.0),)}, "Slower: "),
        (
            {"speeds": (reports.speed(1, 128, 6.0, 4.0), reports.speed(8, 128, 6.0, 6.0))},
            "Faster at 1 of 2 sizes only: ",
        ),
        ({"speeds": (reports.speed(1, 128, 6.0, 4.0, void="6 fused, 3 fused"),)}, "speed void (6 fused, 3 fused)"),
        ({"speeds": ()}, "Speed not measured: "),
        ({"proofs": ()}, "No proof was run: "),
        (
            {"proofs": reports.proofs(math.nan)},
            "relative error not a number where 0.0001 is allowed (1 of 6 proofs fail)",
        ),
        (
            {"drop_status": DropStatus.FAILED, "proofs": reports.proofs(1.0), "speeds": ()},
            "Numbers differ, the metric fell too far, speed not measured: ",
        ),
        ({"drop_status": DropStatus.FAILED}, "more than --max-drop 0.02 allows"),
        ({"scores": ()}, "no metric measured"),
        ({"refused": (Refusal(what="a", why="b"),)}, "one site was refused"),
        ({"plan": reports.dense(reports.bert_plan()).model_copy(update={"method": "dsp"})}, "Nothing was dropped: "),
    ],
)
def test_verdict_names_the_outcome(fields: dict[str, Any], text: str) -> None:
    assert text in reports.report(**fields).verdict


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"speeds": ()}, "speed"),
        ({"proofs": ()}, "proof"),
        ({"speeds": (), "plan": reports.dense(reports.bert_plan())}, "speed"),
    ],
)
def test_verdict_says_once_what_was_not_measured(fields: dict[str, Any], subject: str) -> None:
    assert reports.report(**fields).verdict.lower().count(subject) == 1


def test_verdict_quotes_the_test_rows_and_says_when_lower_is_better() -> None:
    text = reports.encoder_decoder().verdict
    assert "perplexity on the test rows 18.2 → 18.9, +0.73 (95% interval +0.52 to +0.97), lower is better" in text
    assert "eval" not in reports.report().verdict


@pytest.mark.parametrize("name", reports.REPORTS)
def test_report_is_read_back_from_strict_json_without_a_change(name: str, tmp_path: Path) -> None:
    text = to_json(reports.REPORTS[name]())
    json.loads(text, parse_constant=pytest.fail)
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    assert to_json(load(tmp_path)) == text


def test_a_loaded_report_is_written_to_the_same_files(tmp_path: Path) -> None:
    page = write(reports.report(), tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert page == tmp_path / "report.html"
    assert set(first) == {"report.json", "report.html"}
    write(load(tmp_path), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_report_is_validated_before_it_is_written(tmp_path: Path) -> None:
    invalid = reports.bare().model_copy(update={"drop_status": "perhaps"})
    with pytest.raises(pydantic.ValidationError, match="drop_status"):
        write(invalid, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_former_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(reports.bare(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_text = Path.write_text

    def fail_to_write(path: Path, text: str, **kwargs: Any) -> int:
        if "html" in path.name:
            raise OSError(28, "No space left on device")
        return write_text(path, text, **kwargs)

    monkeypatch.setattr(Path, "write_text", fail_to_write)
    with pytest.raises(OSError, match="No space left"):
        write(reports.not_faster(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "report.json: no such report; name the folder of a finished run"),
        (b"", "report.json: report: Invalid JSON: EOF"),
        (b'{"version": 1, "verdict"', "report.json: report: Invalid JSON: EOF"),
        (b"\xff\xfe\x00", "report.json: report: Invalid JSON"),
        (b"[]", "report.json: report: Input should be an object"),
        (b'{"version": 2}', "report.json: version: Input should be 1"),
    ],
)
def test_damaged_report_gives_a_one_line_error(content: bytes | None, text: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_field_is_named(tmp_path: Path) -> None:
    data = json.loads(to_json(reports.bare()))
    data["plan"]["groups"][0]["colour"] = "red"
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"plan\.groups\.0\.heads\.colour"):
        load(tmp_path / "report.json")


class _Skeleton(HTMLParser):
    """The tags of a page with the names of their attributes, in order, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _report_with(text: str, *, pictures: bool = False) -> Report:
    """A report with `text` in every field that takes any string."""
    plan = Plan(
        sites=(reports.site(text or "site", 2, [0]),),
        model=text,
        method=text,
        options={text: text},
        data=text,
        evidence={text: [text]},
    )
    curves = (
        reports.curves(20) if not pictures else (reports.CurvePoint(step=1, values={text: 1.0, text + "2": math.inf}),)
    )
    return reports.report(
        verdict=text,
        model=text,
        family=text,
        task=text,
        plan=plan,
        notes=(text,),
        curves=curves if pictures else (),
        scores=(reports.accuracy(metric=text),),
        answers=(AnsweredRow(number=1, texts=(text, text), dense=text, compressed="", expected=text or "e"),),
        task_code=TaskCode(path=text, source=text),
        proofs=tuple(proof.model_copy(update={"cases": (text,)}) for proof in reports.proofs()),
        speeds=(reports.speed(1, 128, 3.0, 2.0, void=text),) if pictures else (),
        dense=reports.engine(10, file=text or "f", optimization=text),
        compressed=reports.engine(9, file=text or "f", optimization=text),
        refused=(Refusal(what=text, why=text),),
        target=text,
        precision=text,
        session={text: text},
        machine={text: text},
        recipe={text: [text, {text: text}]},
        command=text or "c",
        seconds={text: 1.0},
    )


def test_hostile_names_remain_text() -> None:
    hostile, benign = (
        _Skeleton(render(_report_with(HOSTILE, pictures=True))),
        _Skeleton(render(_report_with("a", pictures=True))),
    )
    assert hostile.tags == benign.tags
    assert not any(tag == "script" or name.startswith("on") for tag, names in hostile.tags for name in (tag, *names))
    assert hostile.text.count(HOSTILE) >= 12


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text(alphabet=st.one_of(st.sampled_from("<>&\"'/={}%#\\`$-! \n\0"), st.characters(codec="utf-8")), min_size=1)
)
def test_no_string_changes_the_page_tags(text: str) -> None:
    assert _Skeleton(render(_report_with(text))).tags == _Skeleton(render(_report_with("a"))).tags


@pytest.mark.parametrize("name", reports.REPORTS)
def test_page_uses_no_external_resource(name: str) -> None:
    page = render(reports.REPORTS[name]())
    for external in ("http:", "https:", "//cdn", "@import", "<script", "src=", "<link rel=stylesheet", "file:"):
        assert external not in page
    skeleton = _Skeleton(page)
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids))
    assert ("p", ("id",)) in skeleton.tags


def test_the_page_shows_answers_that_changed_in_bold() -> None:
    page = render(reports.report())
    assert "<b>neg</b></td>" in page
    assert page.count("<b>neg</b>") == 1
    assert "unflinchingly bleak<br>and desperate" in page
    assert 'id="answers"' not in render(reports.report(answers=()))


def test_the_page_shows_the_cosines_of_embeddings() -> None:
    row = AnsweredRow(number=3, texts=("a", "b"), dense="0.911", compressed="0.870", expected="4", cosine=0.93125)
    page = render(reports.report(answers=(row,)))
    assert all(cell in page for cell in ("<td>4</td>", "<td>0.911</td>", "<td>0.870</td>", '<td class="n">0.931</td>'))


def test_page_renders_without_samples_and_with_infinite_scores() -> None:
    without_samples = reports.latency(2.0, 1).model_copy(update={"samples": ()})
    row = reports.speed(1, 128, 3.0, 2.0).model_copy(update={"dense": without_samples, "compressed": without_samples})
    infinite = reports.accuracy(18.2, math.inf, metric="perplexity", low=math.nan, high=math.inf)
    page = render(reports.report(speeds=(row,), scores=(infinite,)))
    assert "0 dense and 0 compressed calls" in page
    assert "perplexity on the test rows 18.2 → ∞" in page


def test_map_shows_original_heads_kinds_and_missing_heads() -> None:
    maps = {kind.title: kind for kind in head_maps(reports.encoder_decoder().plan)}
    assert list(maps) == ["Bidirectional self-attention", "Causal self-attention", "Cross-attention"]
    cross = maps["Cross-attention"]
    assert cross.pattern == "model.decoder.layers.*.encoder_attn"
    assert [row.label for row in cross.rows] == ["0", "1", "2", "3", "4", "5"]
    assert [sum(cell.state != "absent" for cell in row.cells) for row in cross.rows] == [16, 16, 12, 8, 16, 4]
    grouped = maps["Causal self-attention"].rows[0].cells
    assert [head for head, cell in enumerate(grouped) if cell.group] == [4, 8, 12]


def test_tooltips_of_the_map_name_site_head_and_scale() -> None:
    site = reports.SitePlan("layer.10.attn", "bidirectional", 2, 2, 8, (1,), (0.5,))
    (head_map,) = head_maps(Plan(sites=(site,)))
    assert [cell.tooltip for cell in head_map.rows[0].cells] == [
        "layer.10.attn, head 0: dropped",
        "layer.10.attn, head 1: kept, scale 0.5",
    ]
    assert head_map.rows[0].label == "layer.10.attn"


def test_small_numbers_on_the_axes_are_not_rounded_away() -> None:
    assert ">0.0001</text>" in render(reports.report())


def test_page_explains_why_a_curve_without_finite_points_is_not_drawn() -> None:
    assert "not drawn: none of its 98 points is a finite number" in render(reports.wide())


def _printed(report: Report, width: int) -> str:
    buffer = io.StringIO()
    Console(width=width, file=buffer).print(summary(report))
    return buffer.getvalue()


@pytest.mark.parametrize("name", reports.REPORTS)
def test_summary_fits_a_terminal_and_opens_with_the_verdict(name: str) -> None:
    report = reports.REPORTS[name]()
    text = _printed(report, 80)
    assert " ".join(text.split()).startswith(report.verdict)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_summary_prints_brackets_unchanged() -> None:
    report = reports.report(refused=(Refusal(what="[red]x[/red]", why="[/]"),))
    assert "refused: [red]x[/red]: [/]" in _printed(report, 200)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.count(999), "999"),
        (formatting.count(999_950), "1M"),
        (formatting.count(22_713_602), "22.7M"),
        (formatting.count(None), "not measured"),
        (formatting.size(91_000_000), "91 MB"),
        (formatting.size(12), "12 B"),
        (formatting.significant(0.0), "0"),
        (formatting.significant(-0.01234), "−0.0123"),
        (formatting.significant(1234.5), "1234"),
        (formatting.significant(math.inf), "∞"),
        (formatting.seconds(59.9), "59.9 s"),
        (formatting.seconds(3_725), "1 h 2 min"),
        (formatting.change(100, 84.3), "−15.7%"),
        (formatting.change(1e6, 1e6 - 1), "−<0.1%"),
        (formatting.change(0, 5), ""),
    ],
)
def test_numbers_are_formatted_for_readers(text: str, expected: str) -> None:
    assert text == expected


_TEXT = st.text(st.characters(codec="utf-8"))
_PLAIN = st.one_of(_TEXT, st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False))
_VALUE = st.one_of(_PLAIN, st.lists(_PLAIN), st.dictionaries(_TEXT, _PLAIN))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_TEXT, _VALUE))
def test_recipe_is_written_as_valid_toml(recipe: dict[str, Any]) -> None:
    assert tomllib.loads(formatting.toml(recipe)) == recipe


def test_reading_a_report_imports_neither_matplotlib_nor_torch() -> None:
    code = "import sys, compressor.report; print({'matplotlib', 'torch'} & set(sys.modules))"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert text.stdout.strip() == "set()"
