"""Batches: every row is what the target alone says, whatever its neighbours do, in batch and in single decoding."""

from __future__ import annotations

import pytest
import torch
from answers import letters
from oracle import oracle_drafts
from tiny import IMAGE, build_llama, build_llava, random_drafter
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from dream_ext import Decoder, TreeShape

SHAPE = TreeShape(width=3, depth=4, nodes=12)
PAD, NEW = 0, 30


def batch_of(rows: list[list[int]], side: str = "left", **extra) -> dict:
    """Prompts of different lengths, padded on one side."""
    longest = max(map(len, rows))
    pads = [[PAD] * (longest - len(row)) for row in rows]
    ids = [pad + row if side == "left" else row + pad for row, pad in zip(rows, pads)]
    mask = [[0] * len(pad) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(pad)
            for row, pad in zip(rows, pads)]  # fmt: skip
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), **extra}


def prompts(seed: int = 0, lengths=(9, 4, 17, 1)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 150, (n,), generator=generator).tolist() for n in lengths]


def pictures() -> tuple[list[list[int]], dict]:
    """Three prompts with 2, 0 and 1 pictures."""
    a, b, c, d = prompts(3, (5, 7, 11, 3))
    rows = [[1, *a, *[IMAGE] * 4, *d, *[IMAGE] * 4, *b], [1, *c], [1, *[IMAGE] * 4, *a]]
    pixels = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(8))
    return rows, {"pixel_values": pixels}


def answers(call, inputs, seed=None, **kwargs):
    if seed is not None:
        torch.manual_seed(seed)
    return call(**inputs, max_new_tokens=kwargs.pop("max_new_tokens", NEW), **kwargs)


def ours(model, drafter, inputs, monkeypatch, want, seed=None, tree_seed=0, **kwargs):
    decoder = Decoder(model, drafter, tree=SHAPE)
    texts = (want if torch.is_tensor(want) else want.sequences).tolist()
    with oracle_drafts(monkeypatch, texts, seed=tree_seed):
        out = answers(decoder.generate, inputs, seed, **kwargs)
    return out, decoder.stats


@pytest.fixture(scope="module")
def pair():
    model, _ = build_llama()
    return model, random_drafter(model)


SETTINGS = {
    "greedy": dict(do_sample=False),
    "no end": dict(do_sample=False, eos_token_id=None),
    "penalty": dict(do_sample=False, repetition_penalty=1.4, no_repeat_ngram_size=3),
    "sampled": dict(do_sample=True, temperature=0.9, top_k=0),
    "sampled penalty": dict(do_sample=True, temperature=1.2, top_p=0.9, repetition_penalty=1.3),
    "custom processor": dict(do_sample=True, processor=True),
}


class Leans(LogitsProcessor):
    """Looks at all rows at once: each leans to what the row above said last."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        above = input_ids.roll(1, dims=0)[:, -1:]
        return scores.scatter_add(1, above, torch.full_like(above, 2, dtype=scores.dtype))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_batch_is_the_batch_of_the_target(pair, side, setting, monkeypatch):
    """Catches a row that sees a neighbour's padding, length or position, noise of another row or step, a penalty from
    another row's text, padding behind an end that is not there, and a generator left elsewhere."""
    model, drafter = pair
    kwargs = dict(SETTINGS[setting])
    if kwargs.pop("processor", False):
        kwargs["logits_processor"] = LogitsProcessorList([Leans()])
    inputs = batch_of(prompts(), side)
    for seed in range(3):
        want = answers(model.generate, inputs, seed, **kwargs)
        state = torch.get_rng_state()
        got, stats = ours(model, drafter, inputs, monkeypatch, want, seed, seed, **kwargs)
        assert torch.equal(got, want)
        assert torch.equal(torch.get_rng_state(), state)
        assert stats.tau > (1.1 if setting == "custom processor" else 1.5)


def ends_of(model, inputs, count=3) -> list[int]:
    """Tokens that end rows early, each at another step."""
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    start = inputs["input_ids"].shape[1]
    return [int(free[row, start + 4 + 7 * row]) for row in range(count)]


@pytest.mark.parametrize("new", [1, 2, 3])
def test_few_tokens(pair, new):
    """Catches a round where the first token was the last."""
    model, drafter = pair
    inputs = batch_of(prompts())
    want = answers(model.generate, inputs, do_sample=False, max_new_tokens=new)
    assert torch.equal(answers(Decoder(model, drafter).generate, inputs, do_sample=False, max_new_tokens=new), want)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sampled", [False, True])
def test_rows_end_early(attention, sampled, monkeypatch):
    """Catches text behind an end, padding before it, rows that wait for one that is finished, and what the cache and
    the scores hold of finished rows: plain decoding forwards padding there."""
    model, _ = build_llama(seed=4)
    model.set_attn_implementation(attention)
    drafter, inputs = random_drafter(model), batch_of(prompts(4, (9, 4, 17, 6)))
    kwargs = dict(do_sample=sampled, eos_token_id=ends_of(model, inputs), return_dict_in_generate=True)
    kwargs |= dict(output_scores=True, output_logits=True)
    for seed in range(3):
        want = answers(model.generate, inputs, seed, **kwargs)
        got, _ = ours(model, drafter, inputs, monkeypatch, want, seed, seed, **kwargs)
        assert torch.equal(got.sequences, want.sequences)
        assert (want.sequences[:, -1] == PAD).any(), "no row ends early: the test has no power"
        for ours_, theirs in ((got.scores, want.scores), (got.logits, want.logits)):
            assert len(ours_) == len(theirs)
            assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(ours_, theirs))
        for mine, layer in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            assert mine.keys.shape == layer.keys.shape
            assert torch.allclose(mine.keys, layer.keys, atol=1e-4)
            assert torch.allclose(mine.values, layer.values, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_row_is_what_single_decoding_says(pair, side, monkeypatch):
    """Catches a row that depends on its company (left padding; plain decoding itself goes on from the padding of a
    right-padded prompt)."""
    model, drafter = pair
    rows = prompts(6, (12, 5, 8, 2, 9, 3, 15, 7)) if side == "left" else prompts(6, (9,) * 8)
    inputs = batch_of(rows, side)
    want = answers(model.generate, inputs, do_sample=False)
    got, _ = ours(model, drafter, inputs, monkeypatch, want, do_sample=False)
    for row, prompt in zip(got.tolist(), rows):
        alone = answers(model.generate, batch_of([prompt]), do_sample=False)[0].tolist()
        start = inputs["input_ids"].shape[1]
        answer = alone[len(prompt) :]
        assert row[start : start + len(answer)] == answer and set(row[start + len(answer) :]) <= {PAD}


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_rows_with_different_numbers_of_pictures(ratio, monkeypatch):
    """Catches pictures, pruned rows or visual scores of another row."""
    model, _ = build_llava()
    drafter, (rows, extra) = random_drafter(model, visual_ratio=ratio), pictures()
    inputs = batch_of(rows, **extra)
    for kwargs in (dict(do_sample=False), dict(do_sample=True)):
        want = answers(model.generate, inputs, 5, **kwargs)
        got, stats = ours(model, drafter, inputs, monkeypatch, want, 5, **kwargs)
        assert torch.equal(got, want)
        assert stats.visual_tokens == 12 and stats.visual_kept == 12 * ratio


@pytest.mark.parametrize("setting", ["sampled", "sampled penalty", "custom processor"])
def test_with_generators_a_row_is_a_single_run(pair, setting, monkeypatch):
    """Catches noise of another row, and a generator that moves after its row's end or not at all."""
    model, drafter = pair
    kwargs = dict(SETTINGS[setting])
    kwargs.pop("processor", None)
    rows = prompts(7, (9, 4, 12))
    inputs = batch_of(rows)
    eos = ends_of(model, inputs)
    singles, states = [], []
    for row, prompt in enumerate(rows):
        singles.append(answers(model.generate, batch_of([prompt]), 100 + row, eos_token_id=eos, **kwargs)[0])
        states.append(torch.get_rng_state())
    if setting == "custom processor":
        kwargs["logits_processor"] = LogitsProcessorList([lambda ids, scores: scores])
    generators = [torch.Generator().manual_seed(100 + row) for row in range(3)]
    before = torch.get_rng_state()
    start = inputs["input_ids"].shape[1]
    want = [[PAD] * (start - len(p)) + s.tolist() for p, s in zip(rows, singles)]
    out, _ = ours(
        model, drafter, inputs, monkeypatch, torch.tensor([w + [PAD] * (start + NEW - len(w)) for w in want]),
        eos_token_id=eos, generators=generators, **kwargs,
    )  # fmt: skip
    for got, alone in zip(out.tolist(), want):
        assert got[: len(alone)] == alone and set(got[len(alone) :]) <= {PAD}
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, states))
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_that_do_not_fit_are_refused(pair):
    model, drafter = pair
    decoder, inputs = Decoder(model, drafter, tree=SHAPE), batch_of(prompts())
    with pytest.raises(ValueError, match="one torch\\.Generator for each sequence"):
        decoder.generate(**inputs, do_sample=True, generators=[torch.Generator()])
    with pytest.raises(ValueError, match="Generator twice"):
        decoder.generate(**inputs, do_sample=True, generators=[torch.Generator()] * 4)
    with pytest.raises(ValueError, match="for sampling"):
        decoder.generate(**inputs, do_sample=False, generators=[torch.Generator()] * 4)


def test_a_drafter_that_cannot_draft_a_batch_is_refused_before_it_says_anything():
    """Catches a refusal that a streamer hears after the first token."""
    model, _ = build_llama()
    decoder, steps = Decoder(model, random_drafter(model).double(), tree=SHAPE), Steps()
    with pytest.raises(ValueError, match="cannot draft"):
        decoder.generate(**batch_of(prompts()), streamer=steps, do_sample=False)
    assert len(steps.seen) <= 1, "the prompt, which generate itself puts"


class Steps:
    """A streamer and a criterion that write down what they see, in order."""

    def __init__(self) -> None:
        self.seen = []

    def put(self, value):
        self.seen.append(("put", value.tolist()))

    def end(self):
        self.seen.append(("end",))


class Draws:
    """A streamer that draws from the default generator."""

    def put(self, value):
        torch.rand(1)

    def end(self):
        pass


@pytest.mark.parametrize("forecast", [True, False])
def test_a_streamer_may_draw(pair, forecast):
    """Catches rows that choose by noise from before a draw that plain decoding sees first."""
    model, drafter = pair
    inputs, kwargs = batch_of(prompts(5)), dict(do_sample=True, top_k=0)
    decoder = Decoder(model, drafter, tree=SHAPE, forecast=forecast)
    for seed in range(3):
        want = answers(model.generate, inputs, seed, streamer=Draws(), **kwargs)
        state = torch.get_rng_state()
        assert torch.equal(answers(decoder.generate, inputs, seed, streamer=Draws(), **kwargs), want)
        assert torch.equal(torch.get_rng_state(), state)


class Asks(StoppingCriteria):
    """Ends row 1 at its 6th token, and writes down what it is shown."""

    def __init__(self, seen: list, start: int) -> None:
        self.seen, self.start = seen, start

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(("asked", input_ids.tolist()))
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[1] = input_ids.shape[1] >= self.start + 6
        return done


@pytest.mark.parametrize("asked", [False, True])
def test_streamer_and_criteria_see_steps_in_order(pair, asked, monkeypatch):
    """Catches a step shown before all rows have decided it, twice, or beyond an end."""
    model, drafter = pair
    inputs = batch_of(prompts(9))
    seen = []
    for decode in (None, drafter):
        steps = Steps()
        criteria = StoppingCriteriaList([Asks(steps.seen, inputs["input_ids"].shape[1])] if asked else [])
        kwargs = dict(do_sample=False, streamer=steps, stopping_criteria=criteria)
        if decode is None:
            want = answers(model.generate, inputs, **kwargs)
        else:
            got, _ = ours(model, drafter, inputs, monkeypatch, want, **kwargs)
            assert torch.equal(got, want)
        seen.append(steps.seen)
    assert seen[0] == seen[1]


def test_stop_strings_end_rows(pair, monkeypatch):
    """Catches a stop string that is looked for in another row's text, or too late."""
    model, drafter = pair
    inputs = batch_of(prompts(11))
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    start = inputs["input_ids"].shape[1]
    said = [free[row, start + 3 + 5 * row : start + 5 + 5 * row].tolist() for row in (0, 2)]
    tokenizer = letters()
    for eos in (None, 2):
        kwargs = dict(do_sample=False, eos_token_id=eos, tokenizer=tokenizer, stop_strings=tokenizer.batch_decode(said))
        want = answers(model.generate, inputs, **kwargs)
        got, _ = ours(model, drafter, inputs, monkeypatch, want, **kwargs)
        assert torch.equal(got, want)


def test_a_returned_batch_is_resumed(pair, monkeypatch):
    """Catches rows of the cache that are cut at different places, and a second turn that forgets the padding."""
    model, drafter = pair
    inputs = batch_of(prompts(12))
    kwargs = dict(do_sample=False, return_dict_in_generate=True, max_new_tokens=11)
    want, got = answers(model.generate, inputs, **kwargs), None
    got, _ = ours(model, drafter, inputs, monkeypatch, want, **kwargs)
    more = torch.tensor([[11, 12, 13]] * 4)
    results = []
    for first, call in ((want, model.generate), (got, Decoder(model, drafter, tree=SHAPE).generate)):
        ids = torch.cat([first.sequences, more], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(4, ids.shape[1] - inputs["input_ids"].shape[1])], dim=1)
        out = call(
            input_ids=ids, attention_mask=mask.long(), past_key_values=first.past_key_values, do_sample=False,
            max_new_tokens=15,
        )  # fmt: skip
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_a_processor_that_raises_leaves_the_decoder_whole(pair, n, monkeypatch):
    """Catches a batch that is half written, and rounds that the next call gets from a call that failed."""
    model, drafter = pair
    decoder, inputs = Decoder(model, drafter, tree=SHAPE), batch_of(prompts())
    left = [n]

    class Raises(LogitsProcessor):
        def __call__(self, input_ids, scores):
            left[0] -= 1
            if not left[0]:
                raise KeyError("of a processor")
            return scores

    with pytest.raises(KeyError, match="of a processor"):
        decoder.generate(**inputs, max_new_tokens=NEW, logits_processor=LogitsProcessorList([Raises()]))
    want = answers(model.generate, inputs, do_sample=False)
    assert torch.equal(answers(decoder.generate, inputs, do_sample=False), want)


def test_num_return_sequences(pair):
    """Several answers to one prompt are a batch."""
    model, drafter = pair
    inputs = batch_of(prompts()[:1])
    kwargs = dict(do_sample=True, num_return_sequences=3)
    want = answers(model.generate, inputs, 3, **kwargs)
    assert torch.equal(answers(Decoder(model, drafter, tree=SHAPE).generate, inputs, 3, **kwargs), want)


def test_rounds_grow_with_the_batch(pair, monkeypatch):
    """Catches rows that are lost when a batch moves to larger buffers."""
    from dream_ext import rounds

    monkeypatch.setattr(rounds, "_AHEAD", 4)
    monkeypatch.setattr(rounds, "_GRAIN", {"cpu": 16})
    model, drafter = pair
    inputs, kwargs = batch_of(prompts()), dict(do_sample=False, max_new_tokens=60, eos_token_id=None)
    want = answers(model.generate, inputs, **kwargs)
    got, _ = ours(model, drafter, inputs, monkeypatch, want, **kwargs)
    assert torch.equal(got, want)


@pytest.mark.parametrize("sampled", [False, True])
def test_packed_layers_take_batches(sampled, monkeypatch):
    """Catches compiled layers, of target or drafter, that know one sequence alone."""
    from dream_ext.quick import quickenable

    model, _ = build_llama()
    drafter, inputs = random_drafter(model), batch_of(prompts(14))
    want = answers(model.generate, inputs, 2, do_sample=sampled)
    decoder = Decoder(model, drafter, tree=SHAPE, pack=True)
    assert list(quickenable(model)) == [] != list(model.model.layers), "no layer is compiled: the test has no power"
    with oracle_drafts(monkeypatch, want.tolist()):
        assert torch.equal(answers(decoder.generate, inputs, 2, do_sample=sampled), want)
    taus = []
    for pack in (True, False):  # by its own drafts, which must not depend on the form of its weights
        decoder.restore()
        decoder = Decoder(model, drafter, tree=SHAPE, pack=pack)
        assert torch.equal(answers(decoder.generate, inputs, 2, do_sample=sampled), want)
        taus.append(decoder.stats.tau)
    assert abs(taus[0] - taus[1]) < 0.3
    assert torch.equal(answers(model.generate, inputs, 2, do_sample=sampled), want)


def test_rows_that_a_gpu_does_not_choose(pair, monkeypatch):
    """Catches -1, a GPU's word for a row that is no distribution, in the text: `multinomial` has the last word."""
    from dream_ext import device_decode

    def refuses(tokens, *_):
        path = torch.full_like(tokens, -1)
        path[:, 0] = 0
        return path, torch.ones(len(tokens), dtype=torch.long), torch.full((len(tokens),), -1)

    model, drafter = pair
    inputs, kwargs = batch_of(prompts()), dict(do_sample=True, top_k=0)
    want = answers(model.generate, inputs, 1, **kwargs)
    monkeypatch.setattr(device_decode, "sample_tree", refuses)
    assert torch.equal(answers(Decoder(model, drafter, tree=SHAPE).generate, inputs, 1, **kwargs), want)
