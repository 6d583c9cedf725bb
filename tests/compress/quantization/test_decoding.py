"""Choice among forms of a decoder, by forms whose times are known."""

import time
import weakref
from unittest.mock import patch

import pytest
import torch

from lightning_accel.compress import CachedDecoder, NothingPickedError
from lightning_accel.compress.quantization.decoding import quantize_decoder
from lightning_accel.compress.quantization.form import CannotConvertError, Form
from lightning_accel.compress.quantization.trial import MAKERS, Limit, Trial
from lightning_accel.compress.report.progress import Progress
from lightning_accel.models import MoELanguageModel

FAST, SLOW, STATIC = "int8 torchao weight-only", "int8 torchao dynamic", "int8 PT2E static"
SLEPT = 0.03
SENSITIVE = "sensitive: 0.2 of the output is error"
LEFT_FLOAT = {FAST: {}, SLOW: {"model.head": SENSITIVE}}


def sleeping(name, of_prompt, of_step):
    """Make a form that takes as long as that, beside the decoder."""

    def make(module, inputs, layers, **_):
        assert set(LEFT_FLOAT[name].items()) <= set(layers.left_float.items())
        assert ("model.head" in layers.quantized) == ("model.head" not in LEFT_FLOAT[name])

        def run(tokens, *rest):
            time.sleep(of_prompt if tokens.shape[1] > 1 else of_step)
            return module(tokens, *rest)

        return Form(name, run, file_bytes=1000, left_float=dict(layers.left_float))

    return make


@pytest.fixture
def makers():
    """The form that is fast at next tokens is slow at prompts; the static one cannot be made of the decoder."""

    def fail(*_, **__):
        raise CannotConvertError("planted")

    makes = {FAST: sleeping(FAST, SLEPT, 0), SLOW: sleeping(SLOW, 0, SLEPT), STATIC: fail}
    table = {name: MAKERS[name]._replace(make=make) for name, make in makes.items()}
    with patch.dict(MAKERS, table, clear=True):
        yield table


def judged_trial(model, names):
    trial = Trial(model, [], names, Limit(dict, "perplexity", 1.0, False), None, Progress(None))
    trial.made = {name: Form(name, model) for name in names}
    trial.figures = {name: {"perplexity": 3.0 + place} for place, name in enumerate(["fp32 eager", *names])}
    return trial


def decoder_of():
    return CachedDecoder(
        MoELanguageModel(vocab_size=24, dim=8, num_layers=2, attention={"num_heads": 2}).eval(), 12
    ).eval()


def tokens(batch=2, length=5):
    return torch.arange(batch * length).view(batch, length) * 7 % 24


@pytest.mark.slow
def test_forms_are_picked_by_next_tokens_and_the_faster_one_at_prompts_is_noted(makers):
    decoder, measured = decoder_of(), []

    def memory(form, calls, seconds):
        measured.append((form.name, [call[0][0].shape[1] for call in calls], seconds <= 90))
        if form.name == FAST:
            raise TimeoutError("planted")
        return 4321

    judged = judged_trial(decoder.model, [FAST, SLOW, STATIC])
    judged.sensitive[SLOW] = {"head": SENSITIVE}
    result = quantize_decoder(
        decoder, [tokens(), tokens(3)], judged, exclude=["blocks.0.attention.out"], batch_sizes=[2, 1], seconds=0.01,
        memory=memory,
    )  # fmt: skip
    assert result.name == FAST
    report = result.report
    assert (report.title, report.prompt_length, report.quality) == ("decoding", 5, ("perplexity", False))
    rows = {row.name: row for row in report.rows}
    assert {name: row.status for name, row in rows.items()} == {
        "fp32 eager": "", FAST: "picked", SLOW: "", STATIC: "failed"
    }  # fmt: skip
    assert [list(row.latencies) for row in rows.values()] == [[2, 1]] * 3 + [[]]  # single texts decide
    for name, of_prompt, of_step in ((FAST, True, False), (SLOW, False, True)):
        assert all((min(one.rounds_ms) > 1e3 * SLEPT) == of_prompt for one in rows[name].prompts.values())
        assert all((min(one.rounds_ms) > 1e3 * SLEPT) == of_step for one in rows[name].latencies.values())
    assert f"{SLOW} is " in rows[FAST].note
    assert " as fast at prompts, at batch " in rows[FAST].note  # of 1, unless the machine is busy
    assert "faster at" not in rows[SLOW].note
    assert "model.blocks.0.attention.out" in rows[FAST].note
    assert rows[STATIC].note == "planted"
    assert [row.metrics["perplexity"] for row in rows.values()] == [3, 4, 5, 6]
    assert measured == [("fp32 eager", [5, 1], True), (FAST, [5, 1], True)]
    assert "memory not measured" not in rows["fp32 eager"].note
    assert rows["fp32 eager"].memory_bytes == 4321
    assert rows[FAST].memory_bytes is None
    assert "memory not measured: TimeoutError: planted" in rows[FAST].note


@pytest.mark.slow
def test_forms_of_the_model_are_freed_before_those_of_its_decoder_are_made(makers, monkeypatch):
    class Run:
        """Refers to itself, as compiled graphs do."""

        def __init__(self):
            self.itself = self

    maker = makers[FAST]

    def make(*args, **options):
        assert freed() is None
        return maker.make(*args, **options)

    monkeypatch.setitem(makers, FAST, maker._replace(make=make))
    decoder, run = decoder_of(), Run()
    judged, freed = judged_trial(decoder.model, [FAST]), weakref.ref(run)
    judged.made[FAST] = Form(FAST, run)
    del run
    assert quantize_decoder(decoder, [tokens()], judged, seconds=0.01).name == FAST


@pytest.mark.slow
def test_the_model_as_it_is_has_no_file_for_the_reason_that_its_program_has_none(makers):
    reasons = []
    for refused in ({}, {"fp32 compiled": "it needs memory"}):
        decoder = decoder_of()
        judged = judged_trial(decoder.model, [FAST])
        judged.refused.update(refused)
        quantize_decoder(
            decoder, [tokens()], judged, seconds=0.01, memory=lambda form, *_: reasons.append(form.no_file) or 1
        )
    assert reasons[::2] == ["torch.export cannot trace it", "it needs memory"]


@pytest.mark.slow
def test_reasons_are_in_the_report_where_nothing_can_be_picked(makers):
    decoder = decoder_of()
    judged = judged_trial(decoder.model, [FAST, SLOW])
    judged.refused = {FAST: "perplexity is 2 worse", SLOW: "perplexity is 3 worse"}
    with pytest.raises(
        NothingPickedError, match=r"weight-only: perplexity is 2 worse; .* perplexity is 3 worse"
    ) as error:
        quantize_decoder(decoder, [tokens()], judged, seconds=0.01)
    rows = error.value.report.rows
    assert [(row.name, row.status, bool(row.latencies)) for row in rows] == [
        ("fp32 eager", "", True), (FAST, "refused", False), (SLOW, "refused", False)
    ]  # fmt: skip
    assert rows[0].file_bytes > 4 * sum(one.numel() for one in decoder.parameters())
    assert error.value.report.title == "decoding"
