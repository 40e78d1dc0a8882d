"""Translation: pairs to batches, beam search by whatever runs the model, BLEU that any resample of the rows gives."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import compressor
from compressor.block_masks import collect_attention_maps
from compressor.config.run import Recipe
from compressor.errors import InputError, UsageError
from compressor.model_folder import ModelFolder, load
from compressor.report import Report
from compressor.selection.gates import GATES
from compressor.selection.gradient_importance import sensitivity
from compressor.selection.learn import METHODS, learn
from compressor.tasks import Data, batches, open_data, statistics
from compressor.tasks.beam import search
from compressor.tasks.data import rows_hash
from compressor.tasks.metrics import bleu, bleu_counts
from compressor.training.checkpoints import digest
from compressor.units import find_sites, hooked, keep_all
from tests import folders, learning
from tests.folders import Request

MARKS = ("<pad>", "</s>", "<unk>")
GERMAN = "ein zwei hund katze haus rot blau gross".split()
ENGLISH = "one two dog cat house red blue big".split()
SENTENCES = st.lists(st.sampled_from([*ENGLISH, "Two", ",", "dog's", "1,000", "."]), max_size=9).map(" ".join)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of both languages by their spaces, an end mark behind."""
    vocabulary = {word: index for index, word in enumerate((*MARKS, *GERMAN, *ENGLISH))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def marian() -> PreTrainedModel:
    """A Marian of one layer a side, two heads of 8."""
    return hf.MarianMTModel(
        hf.MarianConfig(
            vocab_size=len(MARKS) + len(GERMAN) + len(ENGLISH),
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=20,
            decoder_ffn_dim=20,
            max_position_embeddings=24,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            decoder_start_token_id=0,
            forced_eos_token_id=1,
        )
    )


def t5() -> PreTrainedModel:
    """A T5 of one layer a side."""
    start: dict[str, Any] = {"decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=19, d_model=16, d_kv=8, d_ff=20, num_layers=1, num_heads=2, **start)
    )


def saved(model: PreTrainedModel, path: Path) -> Path:
    """Its folder, with weights large enough for the heads to matter."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def sentence(seed: int) -> tuple[str, str]:
    words = np.random.default_rng(seed).integers(0, len(GERMAN), 1 + seed % 5)
    return " ".join(GERMAN[word] for word in words), " ".join(ENGLISH[word] for word in words)


def tsv(path: Path, *rows: str, header: str = "de\ten") -> str:
    path.write_text("\n".join((header, *rows)) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Marian that has learned its rows, word by word."""
    folder = tmp_path_factory.mktemp("translation")
    rows = tsv(folder / "rows.tsv", *("\t".join(sentence(seed)) for seed in range(40)))
    made = load(saved(marian(), folder / "model"), task="translation")
    torch.manual_seed(0)
    made.model.init_weights()
    data = opened(made, rows)
    batch = data.task.collate(list(data.train))
    optimizer = torch.optim.Adam(made.model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        made.model(**batch).loss.backward()
        optimizer.step()
    made.model.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def folder(place: Path) -> ModelFolder:
    return load(place / "model", task="translation")


def opened(folder: ModelFolder, rows: str, **more: Any) -> Data:
    return open_data(Request(rows, rows, rows, **more), folder)


def runs(model: PreTrainedModel) -> Any:
    def forward(batch: dict[str, torch.Tensor]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(**batch).logits)

    return forward


# Rows


def test_rows_are_known_by_their_reference_texts_too(folder: ModelFolder, tmp_path: Path) -> None:
    """BLEU is taken over the texts: two that are cut or unknown alike are not the same rows."""
    one, same, other = (
        opened(folder, tsv(tmp_path / f"{place}.tsv", "ein hund\tone dog", f"katze\tred {word}"))
        for place, word in enumerate(("cow", "cow", "owl"))
    )
    assert one.test["labels"][:] == other.test["labels"][:]
    assert rows_hash(one.test) == rows_hash(same.test) != rows_hash(other.test)


def test_pairs_become_batches(folder: ModelFolder, tmp_path: Path) -> None:
    data = opened(folder, tsv(tmp_path / "a.tsv", "ein hund\tone dog", "katze\tbig red cat"))
    assert data.task.collate(list(data.train))["labels"].tolist() == [[11, 13, 1, -100], [18, 16, 14, 1]]
    batch = data.task.collate(list(data.train))
    assert batch["input_ids"].tolist() == [[3, 5, 1], [6, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["decoder_input_ids"].tolist() == [[0, 11, 13, 1], [0, 18, 16, 14]]
    assert list(data.train["length"]) == [3, 4]
    loss = folder.model(**batch).loss
    batch.pop("decoder_input_ids")
    assert folder.model(**batch).loss == loss


@pytest.mark.parametrize(
    ("header", "named", "first"),
    [
        ("de\ten", (), "ein"),
        ("en\tde", (), "ein"),
        ("note\ttarget\tsource", (), "one"),
        ("src\ttgt", (), "ein"),
        ("a\tb\tc", ("c", "a"), "hund"),
        ("id\tde\ten", ("de", "en"), "one"),
    ],
)
def test_columns_are_found_by_name(
    header: str, named: tuple[str, ...], first: str, folder: ModelFolder, tmp_path: Path
) -> None:
    row = "\t".join(("ein", "one", "hund")[: header.count("\t") + 1])
    if header == "note\ttarget\tsource":
        row = "ein\thund\tone"
    data = opened(folder, tsv(tmp_path / "a.tsv", row, header=header), text_columns=named)
    assert tokenizer().decode(data.train[0]["input_ids"], skip_special_tokens=True) == first


def test_long_texts_are_cut_and_references_are_not(folder: ModelFolder, tmp_path: Path) -> None:
    row = "\t".join((" ".join(["hund"] * 30), " ".join(["dog"] * 30)))
    data = opened(folder, tsv(tmp_path / "a.tsv", row), max_length=6)
    assert [len(data.test[0][name]) for name in ("input_ids", "labels")] == [6, 6]
    assert data.test[0]["reference"].split() == ["dog"] * 30


def test_the_reader_is_told_what_is_measured(folder: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "a.tsv", "ein\tone", "zwei\ttwo")
    notes = " ".join(opened(folder, rows).notes)
    assert "from its 'de' to its 'en'" in notes
    assert "beam search (5 beams, at most 16 tokens)" in notes
    assert "chosen by the loss" in notes
    assert "BLEU" not in " ".join(opened(folder, rows, metric="loss").notes)


# The metric


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=8), st.integers(0, 99))
def test_counts_of_any_rows_give_sacrebleus_bleu(pairs: list[tuple[str, str]], seed: int) -> None:
    counts = np.stack([bleu_counts(*pair) for pair in pairs])
    for chosen in (np.arange(len(pairs)), np.random.default_rng(seed).integers(0, len(pairs), len(pairs))):
        made, references = zip(*(pairs[index] for index in chosen), strict=True)
        assert bleu(counts[chosen]) == sacrebleu.corpus_bleu(list(made), [list(references)]).score


def test_bleu_of_the_references_is_100(folder: ModelFolder, place: Path) -> None:
    data = opened(folder, str(place / "rows.tsv"))
    assert bleu(np.stack([bleu_counts(row, row) for row in data.test["reference"]])) == pytest.approx(100)


@pytest.mark.parametrize("make", [marian, t5])
def test_the_search_is_the_models_own(make: Any, place: Path, tmp_path: Path) -> None:
    """Without a cache and with the encoder run at every step, the same translations come out, in the rows' order."""
    folder = load(saved(make(), tmp_path / "model"), task="translation")
    data = opened(folder, tsv(tmp_path / "a.tsv", *("\t".join(sentence(seed)) for seed in range(9))))
    model: Any = folder.model
    expected = []
    for row in data.test:
        ids = torch.tensor([row["input_ids"]])
        settings = {"num_beams": 5, "do_sample": False, "max_new_tokens": 16}
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        expected.append(str(tokenizer().decode(made[0], skip_special_tokens=True)))
    found = statistics(data.task, data.test, runs(folder.model), 4)
    assert found.shape == (9, 10)
    assert data.task.score(found) == sacrebleu.corpus_bleu(expected, [list(data.test["reference"])]).score
    assert np.array_equal(found[:, 0], [bleu_counts(text, "")[0] for text in expected])


def test_the_length_penalty_is_the_models(folder: ModelFolder, place: Path) -> None:
    data = opened(folder, str(place / "rows.tsv"))
    batch = {name: data.task.collate(list(data.test))[name] for name in ("input_ids", "attention_mask")}
    lengths = []
    for penalty in (-4.0, 4.0):
        folder.model.generation_config.length_penalty = penalty
        found = search(folder.model, runs(folder.model), batch, 5, 16)
        lengths.append(int((found > 1).sum()))
    folder.model.generation_config.length_penalty = 1.0
    assert lengths[0] < lengths[1]


def test_gated_heads_change_what_is_made(folder: ModelFolder, place: Path) -> None:
    data = opened(folder, str(place / "rows.tsv"))
    dense = statistics(data.task, data.test, runs(folder.model))
    assert data.task.score(dense) > 40
    with hooked(folder.model, lambda name, out: out * 0):
        gated = statistics(data.task, data.test, runs(folder.model))
    assert not np.array_equal(dense, gated)
    assert np.array_equal(dense, statistics(data.task, data.test, runs(folder.model)))


def test_the_loss_is_the_models(folder: ModelFolder, place: Path) -> None:
    data = opened(folder, str(place / "rows.tsv"), metric="loss")
    assert not data.task.higher_is_better
    found = statistics(data.task, data.test, runs(folder.model), 9)
    assert found.shape == (40, 2)
    assert data.task.score(found) == pytest.approx(folder.model(**data.task.collate(list(data.test))).loss.item())
    assert opened(folder, str(place / "rows.tsv")).task.chooser.score(found) == data.task.score(found)


def test_sensitivity_weighs_every_row_alike(folder: ModelFolder, place: Path) -> None:
    """Targets differ in length; rows together give the mean of each one alone, whose loss needs no factor."""
    data = opened(folder, str(place / "rows.tsv"))
    rows = data.train.select(range(6))
    sites = find_sites(folder.model, data.task.collate(list(rows)))
    every = torch.ones(sum(site.heads for site in sites), dtype=torch.bool)
    together, alone = (
        sensitivity(folder.model, sites, every, [batch for _, batch in batches(data.task, rows, size)])
        for size in (6, 1)
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)
    assert {site.kind for site in sites} == {"bidirectional", "causal", "cross"}


def test_maps_of_every_kind_are_averages_over_the_rows_that_have_both_positions(
    folder: ModelFolder, place: Path
) -> None:
    """Rows of several lengths on either side: padding neither adds nor dilutes."""
    data = opened(folder, str(place / "rows.tsv"))
    data = replace(data, train=data.train.select(range(12)))
    sites = find_sites(folder.model, data.task.collate(list(data.train)))
    together, alone = (
        collect_attention_maps(folder.model, sites, data, keep_all(sites), length=12, batch_size=n) for n in (5, 1)
    )
    sides = [data.task.collate([row]) for row in data.train]
    lengths = {
        "bidirectional": [batch["attention_mask"].shape[1] for batch in sides],
        "causal": [batch["labels"].shape[1] for batch in sides],
    }
    asks = {
        "bidirectional": ("bidirectional", "bidirectional"),
        "causal": ("causal", "causal"),
        "cross": ("causal", "bidirectional"),
    }
    for site in sites:
        query, key = (np.array(lengths[side]) for side in asks[site.kind])
        places = np.arange(12)
        both = (query[:, None, None] > places[:, None]) & (key[:, None, None] > places)
        np.testing.assert_array_equal(together.counts[site.name], both.sum(axis=0))
        np.testing.assert_allclose(together.maps[site.name], alone.maps[site.name], atol=1e-6)


# The whole way


@pytest.fixture(scope="module", params=["dsp", pytest.param("taylor", marks=pytest.mark.zoo)])
def report(request: pytest.FixtureRequest, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = tmp_path_factory.mktemp("out") / "out"
    more: dict[str, Any] = {"options": {"pool": "kind", "evaluations": 2}} if request.param == "dsp" else {}
    return compressor.compress(
        Recipe(
            model=place / "model",
            task="translation",
            data=str(place / "rows.tsv"),
            method=request.param,
            keep="50%",
            steps=4,
            batch_size=8,
            max_length=10,
            batch=(1,),
            seq=(8,),
            seconds=0.01,
            out=out,
            **more,
        )
    )


def test_the_report_compares_bleu_on_the_engines(report: Report, folder: ModelFolder, place: Path) -> None:
    (score,) = report.scores
    data = open_data(Request(str(place / "rows.tsv"), max_length=10), folder)
    assert score.dense == data.task.score(statistics(data.task, data.test, runs(folder.model)))
    assert (report.task, score.metric, score.higher_is_better) == ("translation", "bleu", True)
    assert score.dense > 40
    assert report.plan.evidence["test"]["compressed"] == score.compressed
    assert report.plan.heads_kept == 3
    assert all(proof.holds for proof in report.proofs)
    assert any("beam search" in note for note in report.notes)
    assert any("eval_loss" in point.values for point in report.curves)
    if report.plan.method == "dsp":
        assert [len(site.kept) for site in report.plan.sites] == [1, 1, 1]


def test_a_search_chooses_by_the_loss(folder: ModelFolder, place: Path, tmp_path: Path) -> None:
    data = opened(folder, str(place / "rows.tsv"))
    sites = find_sites(folder.model, data.task.collate(list(data.test)))
    before = digest(folder.model)
    learned = learn(folder.model, sites, data, learning.Recipe("taylor", keep=3), tmp_path)
    assert learned.plan.heads_kept == 3
    assert "eval_loss" in learned.curves[-1].values
    assert digest(folder.model) == before


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_exactly_so_many_heads_of_every_pool(
    method: str, folder: ModelFolder, place: Path, tmp_path: Path
) -> None:
    data = opened(folder, str(place / "rows.tsv"))
    sites = find_sites(folder.model, data.task.collate(list(data.test)))
    pace: dict[str, Any] = {"evaluations": 1} if method in GATES else {"trials": 2} if method == "random" else {}
    for pool, keep in (("model", 3), ("bidirectional", 1), ("causal", 1), ("cross", 1)):
        request = learning.Recipe(method, keep=keep, steps=2, options={"pool": pool, **pace})
        learned = learn(copy.deepcopy(folder.model), sites, data, request, tmp_path / pool)
        left = {site.kind: len(site.kept) for site in learned.plan.sites}
        if pool != "model":
            assert left == {"bidirectional": 2, "causal": 2, "cross": 2, pool: 1}
        elif method != "global":  # which removes a head of every layer at a time, and stops before it is below
            assert sum(left.values()) == 3


# Bad input


@pytest.mark.parametrize(
    ("header", "row", "named", "message"),
    [
        ("text\tlabel", "ein\t1", (), r"no pair of source and target among text, label; name both \(--text-columns"),
        ("id\tde\ten", "1\tein\tone", (), "no pair of source and target among id, de, en"),
        ("de\ten", "ein\tone", ("de",), "--text-columns de: a translation has two columns"),
        ("de\ten", "ein\tone", ("de", "fr"), "no column 'fr' among de, en"),
        ("de\ten", "ein\t ", (), "row 2 has an empty 'en'; fill it"),
        ("de\ten", "\tone", (), "row 2 has an empty 'de'; fill it"),
    ],
)
def test_bad_pairs(
    header: str, row: str, named: tuple[str, ...], message: str, folder: ModelFolder, tmp_path: Path
) -> None:
    first = "\t".join(["ein"] * (header.count("\t") + 1))
    with pytest.raises(InputError, match=message):
        opened(folder, tsv(tmp_path / "a.tsv", first, row, header=header), text_columns=named)


def test_bad_models(place: Path, tmp_path: Path) -> None:
    gpt2 = folders.save(folders.gpt2(), tmp_path / "gpt2")
    with pytest.raises(UsageError, match="--task translation: transformers has no gpt2 for it; name another task"):
        load(gpt2, task="translation")
    with pytest.raises(InputError, match=r"rows for the task text2text-generation are not read, .*translation"):
        opened(load(place / "model"), str(place / "rows.tsv"))
    unstarted: Any = t5()
    del unstarted.config.decoder_start_token_id
    with pytest.raises(InputError, match=r"config\.json has no decoder_start_token_id"):
        opened(load(saved(unstarted, tmp_path / "t5"), task="translation"), str(place / "rows.tsv"))


def test_a_budget_in_bleu_ends_no_search(folder: ModelFolder, place: Path, tmp_path: Path) -> None:
    data = opened(folder, str(place / "rows.tsv"))
    sites = find_sites(folder.model, data.task.collate(list(data.test)))
    with pytest.raises(UsageError, match=r"bleu: heads are chosen by the loss, .* \(--metric loss\)"):
        learn(folder.model, sites, data, learning.Recipe("taylor", keep=None, max_drop=1.0), tmp_path)
