"""Searches on a model: weights do not change, steps become curves, and heads of certified steps are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import NoteCode
from compressor.selection.learn import learn, run_search
from compressor.tasks.data import Data
from tests.faults import fails_with
from tests.selection import tiny
from tests.selection.tiny import selection


def test_a_search_changes_no_weight(tmp_path: Path) -> None:
    model, untouched = tiny.classifier(), tiny.classifier()
    learned = tiny.learn_plan(tmp_path, selection(method="taylor", options={"rows": 20}), model)
    assert not learned.trained
    assert tiny.have_same_weights(model, untouched)
    assert [point.values["heads"] for point in learned.curves] == [8, 7, 6, 5, 4, 3]
    assert tiny.gated_accuracy(model, learned.plan) == learned.curves[-1].values["eval_accuracy"]


def test_progress_counts_removed_heads(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    config = selection(method="taylor", keep=6, options={"rows": 8})
    tiny.learn_plan(tmp_path, config, on_progress=lambda finished, total: reports.append((finished, total)))
    assert reports == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(("options", "seed"), [({}, 3), ({"seed": 9}, 9)])
def test_the_seed_of_the_recipe_seeds_the_draws(options: dict[str, int], seed: int, tmp_path: Path) -> None:
    config = selection(method="random", seed=3, options={"trials": 2, **options})
    assert tiny.learn_plan(tmp_path, config).plan.options["seed"] == seed


def test_the_plan_holds_every_option(tmp_path: Path) -> None:
    config = selection(method="random", keep=7, options={"trials": 2})
    assert tiny.learn_plan(tmp_path, config).plan.options == {
        "trials": 2,
        "seed": 0,
        "mixed_precision": "no",
        "pool": "model",
    }


def test_a_loss_that_permits_no_removal_is_an_error(tmp_path: Path) -> None:
    with fails_with(ErrorCode.NOTHING_REMOVED, UsageError, field="max_drop", value=0.0, method="astar"):
        tiny.learn_plan(tmp_path, selection(method="astar", keep=None, max_drop=0.0))


def test_an_interrupted_search_keeps_its_evaluations(tmp_path: Path) -> None:
    """Also before the first of the writes, which are half a minute apart."""

    def interrupt(finished: int, total: int) -> None:
        if finished == 2:
            raise KeyboardInterrupt

    config = selection(method="taylor", keep=4, options={"rows": 8})
    with pytest.raises(KeyboardInterrupt):
        tiny.learn_plan(tmp_path, config, on_progress=interrupt)
    (stored,) = tmp_path.rglob("checkpoint-search.npz")
    with np.load(stored) as file:
        assert len(file["kept"]) >= 3
    uninterrupted = tiny.learn_plan(tmp_path / "other", config)
    assert tiny.learn_plan(tmp_path, config).plan == uninterrupted.plan


ROWS = 241


@pytest.fixture(scope="module")
def many_rows() -> Data:
    """Enough evaluation rows for a certificate."""
    return replace(tiny.data(), eval=tiny.new_rows(ROWS, 3), eval_hash="sha256:eval")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own, in which certificates are recorded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_search_is_certified_on_rows_that_it_has_not_seen(many_rows: Data, tmp_path: Path) -> None:
    config = selection(method="taylor", keep=None, max_drop=0.2, certify=0.9, batch_size=64, options={"rows": 8})
    model = tiny.classifier()
    learned, repeated = (learn(model, tiny.sites_of(model), many_rows, config, tmp_path) for _ in range(2))
    assert learned.plan == repeated.plan
    certificate = learned.certificate
    assert certificate is not None
    assert (certificate.searched_rows, certificate.unseen_rows) == (ROWS // 2 + 1, ROWS // 2)
    assert [note.code for note in learned.notes] == [NoteCode.CERTIFIED, NoteCode.CERTIFICATION_COST]
    assert certificate.removed == 8 - learned.plan.heads_kept > 0
    assert certificate.p_value <= 0.1
    assert (certificate.scope.engine, certificate.scope.precision, certificate.scope.seed) == ("pytorch", "fp32", 0)
    # All heads, one subset for each removed head, and the subset that failed if one did.
    assert any(f"{1 + certificate.removed + failed} evaluations" in learned.notes[1].text for failed in (0, 1))
    assert learned.curves[certificate.removed].values["heads"] == learned.plan.heads_kept


def test_each_certificate_counts_the_others_of_its_rows(many_rows: Data, tmp_path: Path) -> None:
    """The same run again is the same certificate; another seed, and rows of which some were used, make others."""
    config = selection(method="random", keep=None, max_drop=0.9, certify=0.5, batch_size=64, options={"trials": 1})
    whole, model = replace(many_rows, eval=many_rows.eval.select(range(80))), tiny.classifier()
    half, known = replace(whole, eval=whole.eval.select(range(40))), {tuple(ids) for ids in whole.eval["input_ids"]}
    unseen = replace(whole, eval=tiny.new_rows(40, 9).filter(lambda row: tuple(row["input_ids"]) not in known))
    earlier = []
    for number, (data, seed) in enumerate([(whole, 0), (whole, 0), (whole, 1), (half, 0), (unseen, 0)]):
        seeded = config.model_copy(update={"seed": seed})
        learned = learn(model, tiny.sites_of(model), data, seeded, tmp_path / str(number))
        assert learned.certificate is not None
        earlier.append(learned.certificate.scope.earlier)
    assert earlier == [0, 0, 1, 2, 0]


def test_too_few_rows_for_a_certificate_are_refused_before_the_search(many_rows: Data, tmp_path: Path) -> None:
    config, model = selection(method="taylor", keep=None, max_drop=0.001, certify=0.9), tiny.classifier()

    def fail(*arguments: object) -> None:
        raise AssertionError("evaluated")

    with fails_with(ErrorCode.TOO_FEW_ROWS, InputError, rows=ROWS):
        run_search(
            model,
            tiny.sites_of(model),
            many_rows,
            config,
            None,
            tmp_path,
            lambda finished, total: None,
            fail,  # type: ignore[arg-type]
        )
