"""An engine generates what the model generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

import compressor
from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from compressor.generation.engine_model import EngineCache
from compressor.generation.runner import Runner, _Text, load_engine
from compressor.targets.caches import DECODER
from tests.generation.counting import POSITIONS, SIZE, TEMPLATE, tokenizer, write_decoder_only, write_encoder_decoder
from tests.generation.exported import MODELS, QUICK, RUNTIMES, built, exported, inputs, model

FAMILIES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.zoo]) for name in MODELS]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.9},
    "sampling of beams": {"do_sample": True, "num_beams": 2},
    "without a cache": {"use_cache": False},
    "penalty": {"repetition_penalty": 1.3, "min_new_tokens": 10},
    "chunks": {"prefill_chunk_size": 3},
}


def tokens(engine: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ids: Tensor = engine.generate(**batch, pad_token_id=0, max_new_tokens=12, **options)
    return ids


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_the_model(name: str, runtime: str) -> None:
    whole, engine, batch = model(name), load_engine(built(name, runtime), provider="cpu", threads=1), inputs(name)
    seen = set[int]()
    for mode, options in MODES.items():
        if mode == "chunks" and whole.config.is_encoder_decoder:
            continue
        expected = tokens(whole, batch, **options)
        seen.update(expected.flatten().tolist())
        assert torch.equal(tokens(engine, batch, **options), expected), mode
    assert len(seen) > 5


def test_tokens_with_guidance_equal_those_of_the_model() -> None:
    """A second text without the prompt is read in turn, which a request of OpenVINO, with its own states, cannot."""
    batch, options = {"input_ids": inputs("llama")["input_ids"][:1]}, {"guidance_scale": 1.5}
    expected = tokens(model("llama"), batch, **options)
    assert not torch.equal(expected, tokens(model("llama"), batch))
    engines = {runtime: load_engine(built("llama", runtime), provider="cpu", threads=1) for runtime in RUNTIMES}
    assert torch.equal(tokens(engines["ort"], batch, **options), expected)
    with pytest.raises(InputError) as error:
        tokens(engines["openvino"], batch, **options)
    assert error.value.code == ErrorCode.UNSUPPORTED


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_model(name: str) -> None:
    engines: tuple[Any, Any] = model(name), load_engine(exported(name), provider="cpu", threads=1)
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    results = [each.generate(**inputs(name), **options, max_new_tokens=5, pad_token_id=0) for each in engines]
    for expected, logits in zip(*(torch.stack(result.logits) for result in results), strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.zoo
def test_long_sounds_are_transcribed_as_by_the_model() -> None:
    engines: tuple[Any, Any] = model("whisper"), load_engine(exported("whisper"), provider="cpu", threads=1).model
    settings = GenerationConfig(
        no_timestamps_token_id=49, is_multilingual=False, decoder_start_token_id=47, eos_token_id=46, pad_token_id=48,
        bos_token_id=46, max_initial_timestamp_index=5, prev_sot_token_id=45, return_timestamps=False,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(2))}
    batch["attention_mask"] = torch.ones(2, 100, dtype=torch.long)
    fallback: dict[str, Any] = {"temperature": (0.0, 0.5), "logprob_threshold": -1.0}
    options = {"return_timestamps": True, "max_new_tokens": 20, **fallback}
    results = []
    for source in engines:
        source.generation_config = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            results.append(source.generate(**batch, **options))
    assert torch.equal(*results)


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """An engine that counts, with a template of chats."""
    return load_engine(write_decoder_only(tmp_path_factory.mktemp("counting"), template=TEMPLATE), threads=1)


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """An encoder-decoder that counts from zero."""
    return load_engine(write_encoder_decoder(tmp_path_factory.mktemp("answering")), threads=1)


def test_a_public_name_loads_an_engine() -> None:
    assert compressor.load_engine is load_engine


def test_prompts_are_completed_in_one_batch(counting: Runner) -> None:
    prompts = ["five", "one two three four"]
    assert counting.complete(prompts, max_new_tokens=3) == ["six seven eight", "five six seven"]
    assert counting.complete(prompts) == ["six seven eight nine ten", "five six seven eight nine ten"]


def test_an_encoder_decoder_answers(answering: Runner) -> None:
    assert answering.complete(["five", "six seven"], max_new_tokens=3) == ["one two three"] * 2
    assert answering.complete(["five"], num_beams=2, max_new_tokens=3) == ["one two three"]


def test_a_message_is_formatted_by_the_template(counting: Runner) -> None:
    assert counting.complete(["one"], chat=True, max_new_tokens=2) == ["two three"]
    assert counting.tokenize(["one"], chat=True) == [[3, 1]]


def test_parts_are_written_while_they_are_generated(counting: Runner) -> None:
    parts: list[str] = []
    (text,) = counting.complete(["two"], write=parts.append, max_new_tokens=4)
    assert "".join(parts) == text == "three four five six"
    assert len(parts) == 4


def test_beams_are_written_at_the_end(counting: Runner) -> None:
    parts: list[str] = []
    assert counting.complete(["two"], write=parts.append, num_beams=2, max_new_tokens=3) == parts


def test_a_text_ends_before_a_stop_text(counting: Runner) -> None:
    parts: list[str] = []
    assert counting.complete(["one"], stop=["five", " four"], write=parts.append) == ["two three"]
    assert "".join(parts) == "two three"
    assert counting.complete(["one", "four"], stop=["three", "nine"]) == ["two ", "five six seven eight "]
    assert counting.complete(["one"], stop=["three"], num_beams=2) == ["two "]


def test_generation_ends_at_a_stop_text(counting: Runner) -> None:
    calls: list[int] = []

    def count(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(len(ids))
        return scores

    counting.complete(["one"], stop=["three"], logits_processor=LogitsProcessorList([count]))
    assert len(calls) == 2


def test_no_beginning_of_a_stop_text_is_written() -> None:
    written: list[str] = []
    text = _Text(tokenizer(), ["</s>", "END"], written.append)
    for part in ("a <", "/b <", "/s", "> c"):
        text.on_finalized_text(part)
    text.on_finalized_text("", stream_end=True)
    assert written == ["a ", "</b "]


def test_the_rest_is_written_at_the_end() -> None:
    written: list[str] = []
    text = _Text(tokenizer(), ["</s>"], written.append)
    text.on_finalized_text("a </")
    text.on_finalized_text("", stream_end=True)
    assert written == ["a ", "</"]


def test_tokens_are_drawn_by_a_seed_and_the_state_stays(counting: Runner) -> None:
    draws: dict[str, Any] = {"temperature": 20.0, "max_new_tokens": 8}
    state = torch.random.get_rng_state()
    texts = [counting.complete(["one"], seed=seed, **draws) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert counting.complete(["one"], max_new_tokens=2) == ["two three"]


def test_the_settings_of_the_folder_hold(tmp_path: Path) -> None:
    settings = GenerationConfig(max_new_tokens=2, do_sample=True, temperature=30.0, cache_implementation="static")
    settings.save_pretrained(write_decoder_only(tmp_path))
    engine = load_engine(tmp_path, threads=1)
    assert engine.complete(["one"]) == ["two three"]
    assert engine.generate(torch.tensor([[1]]), do_sample=False).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"return_dict_in_generate": True},
        {"do_sample": True, "temperature": 9.0, "num_return_sequences": 3},
    ],
    ids=str,
)
def test_each_prompt_has_one_text_whatever_the_settings_are(tmp_path: Path, settings: dict[str, Any]) -> None:
    (write_decoder_only(tmp_path) / "generation_config.json").write_text(json.dumps(settings))
    engine = load_engine(tmp_path, threads=1)
    assert engine.complete(["one", "five"], max_new_tokens=2) == ["two three", "six seven"]


@pytest.mark.parametrize("padding", [3, -1, None])
def test_a_text_that_ends_early_is_that_of_its_prompt_alone(tmp_path: Path, padding: int | None) -> None:
    (write_decoder_only(tmp_path) / "generation_config.json").write_text(json.dumps({"pad_token_id": padding}))
    engine, prompts = load_engine(tmp_path, threads=1), ["nine", "one", "seven eight"]
    modes: list[dict[str, Any]] = [{}, {"num_beams": 2}]
    for options in modes:
        alone = [engine.complete([prompt], **options) for prompt in prompts]
        assert engine.complete(prompts, **options) == [text for (text,) in alone]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"max_length": 3}, ErrorCode.TOO_LONG),
        ({"penalty_alpha": 0.5, "top_k": 4}, ErrorCode.INVALID_VALUE),
        ({"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 1.0}, ErrorCode.INVALID_VALUE),
        ({"stop_strings": ["four"]}, ErrorCode.INVALID_VALUE),  # of tokenizers with words transformers takes none
        ({"prompt_lookup_num_tokens": 3}, ErrorCode.UNSUPPORTED),
    ],
    ids=str,
)
def test_settings_that_cannot_hold_are_refused(tmp_path: Path, settings: dict[str, Any], code: ErrorCode) -> None:
    (write_decoder_only(tmp_path) / "generation_config.json").write_text(json.dumps(settings))
    check(InputError, code, load_engine(tmp_path, threads=1), "one two three")


def test_a_text_is_continued_from_its_cache(counting: Runner) -> None:
    first = counting.generate(torch.tensor([[1, 2]]), max_new_tokens=2, return_dict_in_generate=True)
    cache = first.past_key_values
    assert isinstance(cache, EngineCache)
    assert cache.get_seq_length() == 3
    ids = torch.cat([first.sequences, torch.tensor([[7]])], 1)
    assert counting.generate(ids, past_key_values=cache, max_new_tokens=2).tolist() == [[1, 2, 3, 4, 7, 8, 9]]
    cache.batch_repeat_interleave(2)
    assert cache.caches.batch == 2


IDS = torch.tensor([[1, 2]])
REFUSED: dict[str, dict[str, Any]] = {
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 2},
    "cache_implementation": {"cache_implementation": "static"},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 2, 4)},
    "past_key_values": {"past_key_values": DynamicCache([(torch.zeros(1, 2, 1, 3),) * 2])},
    "token_type_ids": {"token_type_ids": torch.zeros_like(IDS)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_needs_more_is_refused_by_name(counting: Runner, name: str) -> None:
    with pytest.raises(InputError) as error:
        counting.generate(IDS, max_new_tokens=2, **REFUSED[name])
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.UNSUPPORTED, name)


def test_no_encoded_image_is_no_option(counting: Runner) -> None:
    assert counting.generate(IDS, mm_encoder_outputs={}, max_new_tokens=2).tolist() == [[1, 2, 3, 4]]


def test_an_engine_is_refused_as_the_model_that_is_assisted(counting: Runner) -> None:
    with pytest.raises(InputError) as error:
        counting.generate(IDS, assistant_model=counting.model)
    assert error.value.details["field"] == "assistant_model"


def test_a_cache_is_not_shortened(counting: Runner) -> None:
    cache = EngineCache(counting.sessions.start(1))
    assert not cache.is_croppable
    with pytest.raises(InputError):
        cache.crop(1)


def test_padding_inside_a_decoder_of_an_encoder_decoder_is_refused(answering: Runner) -> None:
    masked = {"decoder_input_ids": IDS, "decoder_attention_mask": torch.tensor([[0, 1]])}
    with pytest.raises(InputError) as error:
        answering.generate(IDS, max_new_tokens=2, **masked)
    assert error.value.details["field"] == "decoder_attention_mask"


def check(error: type[CompressorError], code: ErrorCode, engine: Runner, prompt: str, **options: Any) -> None:
    with pytest.raises(error) as raised:
        engine.complete([prompt], **options)
    assert raised.value.code == code
    assert "\n" not in str(raised.value)


def test_positions_are_enough_or_the_prompt_is_refused(counting: Runner, answering: Runner) -> None:
    long = "one " * POSITIONS
    check(InputError, ErrorCode.TOO_LONG, counting, long)
    check(InputError, ErrorCode.TOO_LONG, counting, "one two", max_new_tokens=POSITIONS - 1)
    check(InputError, ErrorCode.TOO_LONG, answering, long + "one")
    check(InputError, ErrorCode.TOO_LONG, answering, "one", max_new_tokens=POSITIONS)
    assert counting.new_tokens([[1] * 5]) == POSITIONS - 5
    assert answering.new_tokens([[1] * POSITIONS]) == POSITIONS - 1


def test_bad_input_has_a_code(counting: Runner, answering: Runner, tmp_path: Path) -> None:
    check(InputError, ErrorCode.MISSING_VALUE, counting, "")
    check(UsageError, ErrorCode.OUT_OF_RANGE, counting, "one", num_beams=SIZE + 1)
    check(UsageError, ErrorCode.OUT_OF_RANGE, counting, "one", max_new_tokens=0)
    check(UsageError, ErrorCode.OUT_OF_RANGE, counting, "one", stop=["four", ""])
    check(InputError, ErrorCode.INVALID_VALUE, counting, "one", temperature=1e-320)
    check(UsageError, ErrorCode.OUT_OF_RANGE, counting, "one", num_beams=0)
    check(UsageError, ErrorCode.CONTRADICTION, answering, "one", chat=True)
    plain = load_engine(write_decoder_only(tmp_path), threads=1)
    check(InputError, ErrorCode.FILE_MISSING, plain, "one", chat=True)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    check(InputError, ErrorCode.FILE_MISSING, load_engine(tmp_path, threads=1), "one")
    broken = load_engine(write_decoder_only(tmp_path, template="{{ raise_exception('no') }}"), threads=1)
    check(InputError, ErrorCode.FILE_UNREADABLE, broken, "one", chat=True)


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["counting", "answering"])
def test_a_batch_without_tokens_is_refused(kind: str, shape: tuple[int, int], request: pytest.FixtureRequest) -> None:
    engine: Runner = request.getfixturevalue(kind)
    with pytest.raises((InputError, ValueError)):
        engine.generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=2)


@pytest.mark.parametrize("beams", [0, -1, SIZE + 1])
def test_a_number_of_beams_is_between_one_and_the_tokens(counting: Runner, beams: int) -> None:
    with pytest.raises(UsageError) as error:
        counting.generate(torch.tensor([[1]]), num_beams=beams, max_new_tokens=2)
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.OUT_OF_RANGE, "beams")


def test_a_folder_that_does_not_generate_is_refused(tmp_path: Path) -> None:
    from tests import folders

    with pytest.raises(InputError) as error:
        load_engine(folders.save(folders.bert(), tmp_path / "bert"))
    assert error.value.code == ErrorCode.UNSUPPORTED_MODEL
    write_decoder_only(tmp_path / "counting")
    (tmp_path / "counting" / "generation_config.json").write_text("[")
    with pytest.raises(InputError) as error:
        load_engine(tmp_path / "counting")
    assert error.value.code == ErrorCode.FILE_UNREADABLE
    (tmp_path / "counting" / DECODER).unlink()
    with pytest.raises(InputError) as error:
        load_engine(tmp_path / "counting")
    assert error.value.code == ErrorCode.FILE_MISSING
