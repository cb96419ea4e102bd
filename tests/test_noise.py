"""The noise of sampling: what multinomial will draw, seen in advance, and drawn by nobody but multinomial."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny import build_llama, build_llava, random_drafter
from transformers import LogitsProcessor, LogitsProcessorList

from dream_ext import Decoder, TreeShape, noise
from dream_ext.noise import Sampler
from dream_ext.sampling import Emitter

CPU = torch.device("cpu")


def plain(scores, seed):
    """Tokens of `multinomial`, one step after the other, and the generator's state at the end."""
    torch.manual_seed(seed)
    tokens = [int(torch.multinomial(torch.softmax(row, -1), 1)) for row in scores]
    return tokens, torch.get_rng_state()


@pytest.mark.parametrize("size", [7, 4096])
def test_choices_and_generator_are_those_of_multinomial(size):
    """Catches a forecast that moves the generator."""
    scores = torch.randn(30, 1, size, generator=torch.Generator().manual_seed(0)) * 3
    want, state = plain(scores, 11)
    torch.manual_seed(11)
    sampler, got = Sampler(CPU), []
    for step, row in enumerate(scores):
        sampler.forecast(step % 5, size)
        got.append(int(sampler(row)))
    assert got == want and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [7, 4096])
def test_the_forecast_comes_true(size):
    """Catches the noise of another step, and noise from before somebody else drew."""
    p = torch.softmax(torch.randn(1, size, generator=torch.Generator().manual_seed(0)), -1)
    torch.manual_seed(4)
    sampler = Sampler(CPU)
    for draws in (0, 1, 0, 3):
        sampler.forecast(2, size)
        torch.rand(draws)
        ahead = [sampler.forecast(step, size) for step in range(3)]
        assert [int((p / noise).argmax()) for noise in ahead] == [int(sampler(p.log())) for _ in range(3)]


def test_a_forecast_disturbs_no_other_thread():
    """Catches a default generator that is wound back while somebody else draws from it."""
    sampler, done, seen = Sampler(CPU), threading.Event(), []

    def draw():
        while not done.is_set():
            seen.append(float(torch.rand(())))

    torch.manual_seed(8)
    thread = threading.Thread(target=draw)
    thread.start()
    for _ in range(300):
        sampler.forecast(3, 64)
    done.set()
    thread.join()
    torch.manual_seed(8)
    assert seen == [float(torch.rand(())) for _ in seen]


class DrawsItself(LogitsProcessor):
    """A processor that consumes the generator, as somebody's watermark might."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand(scores.shape[-1]) * 2


def test_a_processor_that_draws_changes_nothing():
    model, inputs = build_llama()
    decoder = Decoder(model, random_drafter(model), tree=TreeShape(3, 4, 10))
    arguments = dict(max_new_tokens=20, do_sample=True, logits_processor=LogitsProcessorList([DrawsItself()]))
    torch.manual_seed(2)
    want = model.generate(**inputs, **arguments)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(decoder.generate(**inputs, **arguments), want)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_perfect_drafter_always_drafts_the_sampled_token(monkeypatch):
    """Catches the noise of another step, another temperature, or another order of the draft vocabulary."""
    monkeypatch.setattr(noise, "LOGIT_WEIGHT", 1.0)  # a drafter without error needs no caution
    monkeypatch.setattr(noise, "NOISE_WEIGHT", 1.0)
    logits, vocab = torch.randn(6, 50) * 2, torch.randperm(50)[:30].sort().values
    sampler = Sampler(CPU, temperature=0.7)
    torch.manual_seed(1)
    drafted = [sampler.draft_scores(row[None], level, None, 50).argmax().item() for level, row in enumerate(logits, 1)]
    some = [sampler.draft_scores(row[None, vocab], i, vocab, 50)[0] for i, row in enumerate(logits, 1)]
    full = [sampler.draft_scores(row[None], i, None, 50)[0][vocab] for i, row in enumerate(logits, 1)]
    assert all(torch.equal(a, b) for a, b in zip(some, full, strict=True))
    assert drafted == [int(sampler(row[None] / 0.7)) for row in logits]


@pytest.mark.parametrize("forecast", [True, False])
def test_the_drafts_read_the_noise_only_when_asked(forecast, monkeypatch):
    """Catches an option that is accepted and not passed on, either way."""
    model, inputs = build_llama()
    read, plain_scores = [], Sampler.draft_scores
    monkeypatch.setattr(Sampler, "draft_scores", lambda self, *args: read.append(args) or plain_scores(self, *args))
    decoder = Decoder(model, random_drafter(model), tree=TreeShape(3, 4, 10), forecast=forecast)
    decoder.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert not read
    decoder.generate(**inputs, max_new_tokens=12, do_sample=True)
    assert bool(read) == forecast


@pytest.mark.parametrize("forecast", [True, False])
@pytest.mark.parametrize(
    "setting",
    [
        dict(temperature=1.0, top_k=0),
        dict(temperature=0.7, top_p=0.9),
        dict(temperature=1.3, top_k=20, repetition_penalty=1.3),
    ],
    ids=["t1", "t07_top_p", "t13_top_k_penalty"],
)
def test_same_text_and_generator_with_and_without_forecast(setting, forecast):
    """Drafts of the drafter itself: catches a forecast, or its absence, that moves the generator or the choice."""
    model, inputs = build_llava()
    arguments = dict(setting, do_sample=True, max_new_tokens=30)
    decoder = Decoder(model, random_drafter(model), tree=TreeShape(3, 4, 10), forecast=forecast)
    for seed in (7, 8):
        torch.manual_seed(seed)
        want = model.generate(**inputs, **arguments)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(decoder.generate(**inputs, **arguments), want)
        assert torch.equal(torch.get_rng_state(), state)


def test_zero_probability_is_never_emitted():
    """`p = 0` stays impossible, whatever the noise."""
    sampler, scores = Sampler(CPU), torch.tensor([[float("-inf"), 0.0, float("-inf"), -30.0, float("-inf")]])
    assert {int(sampler(scores)) for _ in range(2000)} <= {1, 3}


def test_scores_without_a_distribution_are_refused_as_by_multinomial():
    with pytest.raises(RuntimeError, match="probability tensor"):
        Sampler(CPU)(torch.full((1, 5), float("nan")))


def test_noise_that_is_zero_breaks_no_draft():
    """Catches an infinite score: the generator may return exactly 0."""
    sampler = Sampler(CPU)
    sampler.forecast(0, 4)[0, 2] = 0.0
    assert sampler.draft_scores(torch.zeros(1, 4), 1, None, 4).isfinite().all()


def test_rows_that_run_ahead_share_no_noise_with_other_threads(monkeypatch):
    """Catches noise that made a choice and is drawn again, by another thread or by a later step: a target that knows
    nothing then repeats itself."""
    model, _ = build_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    rows, vocab, seen = 4, model.config.vocab_size, []
    append = Emitter.append

    def append_and_draw(self, tokens):
        """Every fifth step somebody draws what a step of this batch would."""
        out = append(self, tokens)
        if self.emitted % 5 == 2:
            seen.append(torch.multinomial(torch.ones(rows, vocab), 1)[:, 0])
        return out

    monkeypatch.setattr(Emitter, "append", append_and_draw)
    decoder = Decoder(model, random_drafter(model), tree=TreeShape(3, 4, 12))
    torch.manual_seed(0)
    ids = torch.randint(3, 150, (rows, 9))
    new = decoder.generate(input_ids=ids, do_sample=True, top_k=0, max_new_tokens=200, eos_token_id=None)[:, 9:]
    assert decoder.stats.tau > 2, "no row runs ahead: the test has no power"
    for lag in range(1, 6):
        assert (new[:, lag:] == new[:, :-lag]).float().mean() < 0.03
    theirs = torch.stack(seen, dim=1)
    for lag in range(5):  # their draw, and what the batch says at each of the five steps from there on
        said = new[:, 1 + lag :: 5][:, : theirs.shape[1]]
        assert (said == theirs[:, : said.shape[1]]).float().mean() < 0.05


def test_reserved_noise_is_given_back():
    """Catches a generator that stays behind noise which made no choice, or goes back over somebody's draw."""
    for somebody_draws in (False, True):
        torch.manual_seed(3)
        for _ in range(2):
            torch.empty(2, 50).exponential_()
        want = torch.get_rng_state()
        torch.manual_seed(3)
        sampler = Sampler(CPU, rows=2)
        sampler.reserve()
        sampler.forecast(4, 50)
        reserved = torch.get_rng_state()
        assert sampler.draw() and sampler.draw() and torch.equal(torch.get_rng_state(), reserved)
        if somebody_draws:
            torch.rand(1)
            want = torch.get_rng_state()
            sampler.forecast(5, 50)  # three were left: more is drawn, behind somebody's draw
            assert sampler.draw()
        sampler.release()
        assert torch.equal(torch.get_rng_state(), want)
