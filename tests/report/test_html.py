"""The page of a report as text."""

from __future__ import annotations

import math
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.report import figures
from compressor.report.html import head_maps, render
from compressor.results import AnsweredRow, MetricUnit, Note, Refusal, Report, TaskCode
from graph_passes import Plan
from tests.report import examples, reports

HOSTILE = (
    "</td></title></pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}{% raw %}$\\frac$[red]"
)


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
        notes=(Note(text=text),),
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


@pytest.mark.parametrize("name", examples.REPORTS)
def test_page_uses_no_external_resource(name: str) -> None:
    page = render(examples.REPORTS[name]())
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
    infinite = reports.accuracy(18.2, math.inf, metric="perplexity", unit=MetricUnit.RAW, low=math.nan, high=math.inf)
    page = render(reports.report(speeds=(row,), scores=(infinite,)))
    assert "0 dense and 0 compressed calls" in page
    assert "perplexity on the test rows 18.2 → ∞" in page


def test_map_shows_original_heads_kinds_and_missing_heads() -> None:
    maps = {kind["title"]: kind for kind in head_maps(examples.encoder_decoder().plan)}
    assert list(maps) == ["Bidirectional self-attention", "Causal self-attention", "Cross-attention"]
    cross = maps["Cross-attention"]
    assert cross["pattern"] == "model.decoder.layers.*.encoder_attn"
    assert [label for label, _, _ in cross["rows"]] == ["0", "1", "2", "3", "4", "5"]
    assert [sum(state != "absent" for state, _, _ in cells) for _, _, cells in cross["rows"]] == [16, 16, 12, 8, 16, 4]
    _, _, grouped = maps["Causal self-attention"]["rows"][0]
    assert [head for head, (_, _, is_first) in enumerate(grouped) if is_first] == [4, 8, 12]


def test_tooltips_of_the_map_name_site_head_and_scale() -> None:
    site = reports.SitePlan("layer.10.attn", "bidirectional", 2, 2, 8, (1,), (0.5,))
    (head_map,) = head_maps(Plan(sites=(site,)))
    label, _, cells = head_map["rows"][0]
    assert [tooltip for _, tooltip, _ in cells] == [
        "layer.10.attn, head 0: dropped",
        "layer.10.attn, head 1: kept, scale 0.5",
    ]
    assert label == "layer.10.attn"


def test_equal_numbers_give_equal_figures() -> None:
    assert figures.curve([1, 2], [0.5, 0.25]) == figures.curve([1, 2], [0.5, 0.25])


def test_small_numbers_on_the_axes_are_not_rounded_away() -> None:
    assert ">0.0001</text>" in render(reports.report())


def test_page_explains_why_a_curve_without_finite_points_is_not_drawn() -> None:
    assert "not drawn: none of its 98 points is a finite number" in render(examples.wide())
