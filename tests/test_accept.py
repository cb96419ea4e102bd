"""Acceptance in native code: the walk and the sampler do what the token-by-token way does, call by call."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import oracle_drafts
from tiny import build_llama, random_drafter
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from dream_ext import Decoder, TreeShape, sampling
from dream_ext.noise import Sampler
from dream_ext.sampling import Emitter, walk
from dream_ext.tree import Tree

CPU, VOCAB, PROMPT = torch.device("cpu"), 300, (1, 3, 5)
NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Watch(StoppingCriteria):
    """Stops at a length; with the streamer's, its calls are the order of events."""

    def __init__(self, length: int, events: list) -> None:
        self.length, self.events = length, events

    def __call__(self, input_ids, scores, **kwargs):
        self.events.append(("asked", input_ids[0].tolist(), scores))
        return torch.full((1,), input_ids.shape[1] >= self.length)


class Streamer:
    def __init__(self, events: list, fails_at: int | None) -> None:
        self.events, self.fails_at = events, fails_at

    def put(self, value):
        self.events.append(("streamed", value.tolist(), value.dtype))
        if sum(event[0] == "streamed" for event in self.events) == self.fails_at:
            raise KeyError("the reader is gone")


def emitter(events: list, length: int, fails_at: int | None = None, processors=(), config=None) -> Emitter:
    criteria = StoppingCriteriaList([Watch(length, events)])
    streamer, config = Streamer(events, fails_at), config or GenerationConfig()
    return Emitter(torch.tensor([PROMPT]), LogitsProcessorList(processors), criteria, config, streamer)


def case(seed: int) -> tuple[Tree, torch.Tensor]:
    """A tree and logits whose argmax follows it for a while; siblings may hold one token, a row NaN."""
    rng = random.Random(seed)
    nodes = rng.randint(1, 20)
    parents = [-1, *(max(0, i - rng.randint(1, 3)) for i in range(1, nodes))]
    tokens = [rng.randrange(VOCAB) for _ in parents]
    logits = torch.randn(nodes, VOCAB, generator=torch.Generator().manual_seed(seed))
    for i, parent in enumerate(parents[1:], start=1):
        logits[parent, tokens[i]] = 9.0
    if seed % 5 == 0:
        logits[-1, rng.randrange(VOCAB)] = NAN
    return Tree.from_parents(torch.tensor(tokens), torch.tensor(parents)), logits.to(rng.choice(DTYPES))


@pytest.mark.parametrize("fails_at", [None, 2])
@pytest.mark.parametrize("new", [1, 2, 3, 99])
def test_the_argmax_walk_is_the_walk(new, fails_at):
    """Catches a token emitted past a stop inside a round, a node on the path that the text does not hold, and streamer
    and criteria called in another order: a processor that changes nothing forces the token-by-token way."""
    lengths = set()
    for seed in range(60):
        tree, logits = case(seed)
        results = []
        for processors in ((), (lambda ids, scores: scores,)):
            events, path, raised = [], [], None
            one = emitter(events, len(PROMPT) + new, fails_at, processors)
            assert one.argmax_alone is (not processors)
            try:
                walk(tree, logits, one, path)
            except KeyError as error:
                raised = error.args
            results.append((events, path, raised, one.input_ids.tolist(), one.emitted, one.done))
        assert results[0] == results[1]
        lengths.add(len(results[0][1]))
    assert len(lengths) >= min(new, 2 if fails_at else 5), "paths of one length: the test has no power"


def test_who_must_see_the_text_is_asked_token_by_token(monkeypatch):
    """Catches processors, scores or another choice that the argmax walk would pass over."""

    def forbidden(*_):
        raise AssertionError("the argmax walk was taken")

    monkeypatch.setattr(sampling, "_walk_argmax", forbidden)
    tree, logits = case(1)
    config = GenerationConfig(return_dict_in_generate=True, output_scores=True)
    raw = GenerationConfig(return_dict_in_generate=True, output_logits=True)
    for options in (
        dict(processors=[RepetitionPenaltyLogitsProcessor(1.5)]),
        dict(processors=[TemperatureLogitsWarper(0.5)]),
        dict(config=config),
        dict(config=raw),
    ):
        walk(tree, logits, emitter([], 99, **options), [])
    sampled = emitter([], 99)
    sampled.choose = Sampler(CPU)
    walk(tree, logits, sampled, [])
    with pytest.raises(AssertionError, match="argmax walk"):
        walk(tree, logits.float(), emitter([], 99), [])


def multinomial_forbidden(*_, **__):
    raise AssertionError("multinomial drew what was foreseen")


def draws(scores: torch.Tensor, seed: int) -> list[tuple[int, torch.Tensor]]:
    """Plain sampling: every token, and the generator's state behind it."""
    torch.manual_seed(seed)
    return [(int(torch.multinomial(torch.softmax(row, -1), 1)), torch.get_rng_state()) for row in scores]


@pytest.mark.parametrize("size", [5, 4096])
def test_foreseen_choices_use_their_noise_and_move_the_generator(size, monkeypatch):
    """Catches a second draw, the noise of another step, and a generator that runs ahead of the text: whatever stops a
    round after any token finds the state of plain sampling."""
    scores = torch.randn(24, 1, size, generator=torch.Generator().manual_seed(0)) * 3
    want = draws(scores, 5)
    torch.manual_seed(5)
    sampler, kept = Sampler(CPU), {}
    monkeypatch.setattr(torch, "multinomial", multinomial_forbidden)
    for step, row in enumerate(scores):
        for ahead in range(4):
            noise = sampler.forecast(ahead, size)
            assert kept.setdefault(step + ahead, noise.data_ptr()) == noise.data_ptr(), "drawn twice"
        assert int(sampler(row)) == want[step][0]
        assert torch.equal(torch.get_rng_state(), want[step][1])


def test_two_samplers_share_a_generator():
    """Catches one draw used for two choices: both foresee the same noise, the first to choose gets it."""
    scores = torch.randn(12, 1, 50, generator=torch.Generator().manual_seed(1))
    want = draws(scores, 9)
    torch.manual_seed(9)
    samplers = [Sampler(CPU), Sampler(CPU)]
    for sampler in samplers:
        sampler.forecast(7, 50)
    got = [int(samplers[step % 2](row)) for step, row in enumerate(scores)]
    assert got == [token for token, _ in want] and torch.equal(torch.get_rng_state(), want[-1][1])


def test_no_distribution_is_refused_as_by_multinomial():
    """Catches another error than multinomial's, and a generator that moved before it."""
    torch.manual_seed(0)
    sampler, state = Sampler(CPU), torch.get_rng_state()
    sampler.forecast(2, 5)
    with pytest.raises(RuntimeError, match="probability tensor"):
        sampler(torch.tensor([[0.0, NAN, 1.0, 0.0, 0.0]]))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("scores", [torch.randn(1, 5).double(), torch.randn(1, 5).half(), torch.randn(1, 6)])
def test_scores_of_another_kind_are_multinomials(scores):
    """Catches fp32 noise used for scores that draw another kind of noise, or for another vocabulary."""
    torch.manual_seed(3)
    want, state = int(torch.multinomial(torch.softmax(scores, -1), 1)), torch.get_rng_state()
    torch.manual_seed(3)
    sampler = Sampler(CPU)
    sampler.forecast(2, 5)
    assert int(sampler(scores)) == want and torch.equal(torch.get_rng_state(), state)


class DrawsAt(StoppingCriteria):
    """Consumes the generator when asked for the n-th time, and stops at the end of the script."""

    def __init__(self, at: int, stop: int) -> None:
        self.at, self.stop, self.calls, self.states = at, stop, 0, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            torch.rand(3)
        self.states.append(torch.get_rng_state())
        return torch.full((1,), self.calls >= self.stop)


@pytest.mark.parametrize("options", [dict(top_k=0), dict(temperature=0.7, top_p=0.9), dict(repetition_penalty=1.3)])
@pytest.mark.parametrize("at, stop", [(99, 7), (5, 17), (8, 20)])
def test_a_round_that_is_stopped_or_disturbed(at, stop, options, monkeypatch):
    """Catches noise that is used although a criterion drew in the middle of a round, and a state that is right only at
    the ends of rounds; processors with a history among the settings."""
    model, inputs = build_llama()
    arguments = dict(options, max_new_tokens=40, do_sample=True)
    plain, ours = DrawsAt(at, stop), DrawsAt(at, stop)
    torch.manual_seed(2)
    want = model.generate(**inputs, **arguments, stopping_criteria=StoppingCriteriaList([plain]))
    decoder = Decoder(model, random_drafter(model), tree=TreeShape(3, 5, 12))
    with oracle_drafts(monkeypatch, want[0].tolist()):
        torch.manual_seed(2)
        got = decoder.generate(**inputs, **arguments, stopping_criteria=StoppingCriteriaList([ours]))
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(plain.states, ours.states, strict=True))
    assert decoder.stats.rounds < stop - 1, "no token was accepted: the test has no power"
