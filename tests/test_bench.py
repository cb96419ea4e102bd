"""The benchmark's arithmetic, its identity check, its prompts and its resuming, on tiny random targets."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny import IMAGE, build_llava, random_drafter

from dream_ext import bench_report, parting
from dream_ext.bench import METHODS, Bench, Loaded, Settings, check_methods, generate_options, make_runner
from dream_ext.bench_prompts import SHIPPED, Prompt, choose_prompts, read_questions
from dream_ext.loading import UserError
from dream_ext.timing import timed_answer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_bench(
    file, count=3, dtypes=("float32",), temperatures=(0.0, 1.0), methods=("plain", "dream"), tokens=12, report=None
):
    """A benchmark over random prompts of the tiny LLaVA; `kind` alternates."""
    prompts = [Prompt(f"question {i}", ("known", "new")[i % 2], None) for i in range(count)]

    def load(dtype):
        model, _ = build_llava(dtype=DTYPES[dtype])

        def inputs(prompt):
            return build_llava(seed=1 + prompts.index(prompt), dtype=DTYPES[dtype])[1]

        return Loaded(model, random_drafter(model), inputs)

    settings = Settings(
        methods=check_methods(methods),
        dtypes=dtypes,
        temperatures=temperatures,
        max_new_tokens=tokens,
        seed=5,
        threads=torch.get_num_threads(),
        prompts=tuple(p.key for p in prompts),
        target="tiny",
        drafter="random",
        device="cpu",
    )
    return Bench(settings, prompts, load, file, {"date": "today"}, *([report] if report else []))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "result.json"
    methods = ("plain_packed", "dream", "prompt_lookup", "dream_unpacked", "dream_tau", "dream_blind")
    methods += ("dream_unaware", "dream_tau_unaware")
    made = make_bench(file, dtypes=("bfloat16", "float32"), methods=methods).run()
    assert json.loads(file.read_text()) == made
    return made


def test_rows_cover_every_cell(result):
    """A method that was asked for and silently dropped, fp32 rows of methods that are there for speed only, or greedy
    rows of methods that differ from others when sampling alone."""
    got = {(r["method"], r["dtype"], r["temperature"]) for r in result["rows"]}
    names = ("plain", "plain_packed", "prompt_lookup", "dream", "dream_unpacked", "dream_tau", "dream_blind")
    fast = {(m, "bfloat16", t) for m in names for t in (0.0, 1.0)}
    fast |= {(m, "bfloat16", 1.0) for m in ("dream_unaware", "dream_tau_unaware")}
    exact = {(m, "float32", t) for m in ("plain", "dream") for t in (0.0, 1.0)} | {("dream_unaware", "float32", 1.0)}
    assert got == fast | exact
    assert result["complete"] is True


def test_fp32_answers_are_identical(result):
    """Greedy and same-seed sampled text, and the generator afterwards."""
    for row in result["rows"]:
        if row["dtype"] == "float32":
            assert (row["identical"], row["same_generator"], row["unexplained"]) == (3, 3, 0), row["method"]


def test_plain_is_the_unit(result):
    """Plain decoding has tau 1, speedup 1 and R 1 by definition; anything else means the definitions went astray."""
    for row in result["rows"]:
        if row["method"] == "plain":
            assert row["tau"] == 1 and row["speedup"] == 1 and row["R"] == 1
        else:
            assert row["tau"] >= 1
            assert math.isclose(row["R"] * row["speedup"], row["tau"])


def test_tau_is_the_decoders_own(result):
    """Two ways of counting: hooks on the target's decoder against the decoder's stats."""
    for record in result["details"]:
        if record["method"].startswith("dream"):
            accepted = sum(record["accepted_per_depth"])
            assert record["decode_tokens"] == record["tokens"] - 1
            assert accepted <= record["decode_tokens"] <= accepted + record["rounds"]


def test_summary_describes_the_target(result):
    """Entropy of a distribution over 199 tokens, shares in (0, 1]."""
    summary = result["summary"]
    assert 0 < summary["mean_entropy_nats"] < math.log(199)
    assert 0 < summary["distinct_3"] <= 1 and 0 < summary["distinct_answers"] <= 1


def test_phases_and_kinds(result):
    """Phases add up to the call, and tau is reported for known and new phrasings apart."""
    rows = [r for r in result["rows"] if r["method"] == "dream"]
    for row in rows:
        parts = {phase: ms for phase, ms in row["ms"].items() if phase != "total"}
        assert math.isclose(sum(parts.values()), row["ms"]["total"], rel_tol=1e-6)
        assert {k: v["prompts"] for k, v in row["by_kind"].items()} == {"known": 2, "new": 1}


class Stop(Exception):
    pass


def test_resume_repeats_and_loses_nothing(tmp_path):
    """A killed run taken up again asks exactly the prompts that were missing."""
    file = tmp_path / "result.json"
    asked = []

    def stop_after_two(line, done, total):
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        make_bench(file, report=stop_after_two).run()
    before = json.loads(file.read_text())
    assert before["complete"] is False and len(before["details"]) == 4
    bench = make_bench(file, report=lambda line, done, total: asked.append(done))
    assert bench.resume() == 2
    after = bench.run()
    assert after["details"][:4] == before["details"]
    keys = [(r["dtype"], r["temperature"], r["prompt"], r["method"]) for r in after["details"]]
    assert len(keys) == len(set(keys)) == 3 * 2 * 2
    assert min(asked) == 2 and after["complete"] is True


def test_resume_refuses_other_settings(tmp_path):
    """Numbers of two different runs never end in one file."""
    file = tmp_path / "result.json"
    make_bench(file, count=1, temperatures=(0.0,)).run()
    with pytest.raises(UserError, match="max_new_tokens"):
        make_bench(file, count=1, temperatures=(0.0,), tokens=13).resume()
    file.write_text("{}")
    with pytest.raises(UserError, match="no result"):
        make_bench(file).resume()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_token_is_noticed(tmp_path, monkeypatch, temperature):
    """The identity check can fail: a decoder that changes one token is reported, and not as a near tie."""
    from dream_ext.generate import Decoder

    honest = Decoder.generate

    def dishonest(self, **kwargs):
        out = honest(self, **kwargs).clone()
        out[0, -3] = (out[0, -3] + 1) % 150
        return out

    monkeypatch.setattr(Decoder, "generate", dishonest)
    made = make_bench(tmp_path / "r.json", count=2, temperatures=(temperature,)).run()
    row = next(r for r in made["rows"] if r["method"] == "dream")
    assert row["identical"] == 0 and row["unexplained"] == 2 and row["near_ties"] == 0
    assert row["largest_gap"] > parting.FP32_GAP


def test_near_tie_is_recognised():
    """Two tokens with the same row of the LM head tie exactly: parting there is rounding, in both modes."""
    model, inputs = build_llava()
    options = generate_options(6, 0.0)
    plain = timed_answer(model.generate, model, inputs, seed=0, **options)
    twin = next(t for t in range(3, 150) if t not in plain.ids)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[plain.ids[4]]
    ours = [*plain.ids[:4], twin, *plain.ids[5:]]
    found = parting.Judge(model).explain(inputs, plain.ids, ours, options=options, temperature=0.0, seed=0)
    assert found.index == 4 and found.near_tie and found.gap == 0 and found.referee == "float64"


def test_longer_answer_is_no_near_tie():
    """One answer going on where the other stopped is a wrong stop, never rounding."""
    model, inputs = build_llava()
    found = parting.Judge(model).explain(inputs, [5, 6], [5, 6, 7], options={}, temperature=0.0, seed=0)
    assert not found.near_tie and found.index == 2 and found.to_dict()["gap"] is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_judge_repeats_the_sampling(dtype):
    """argmax(p / noise) with the judge's scores and noise is the token plain sampling emitted, at every step."""
    model, inputs = build_llava(dtype=DTYPES[dtype])
    options = generate_options(8, 0.8)
    plain = timed_answer(model.generate, model, inputs, seed=3, **options)
    judge = parting.Judge(model)
    for step, token in enumerate(plain.ids):
        logits = judge._scores(inputs, plain.ids[:step], options, 3)
        noise = parting.sampling_noise((1, logits.numel()), step, 3, logits.device, torch.float32)[0]
        assert int((torch.softmax(logits / 0.8, -1) / noise.double()).argmax()) == token


def test_prompt_lookup_copies_no_placeholder():
    """With a picture placeholder among its drafts the first forward raises; real scores must stay as they are."""
    model, inputs = build_llava()
    ids = inputs["input_ids"]
    place = int((ids == IMAGE).nonzero()[0, 1])
    ids[0, place - 1] = ids[0, -1]
    again = timed_answer(model.generate, model, inputs, seed=0, **generate_options(12, 0.0))
    looked = make_runner(METHODS["prompt_lookup"], model, None)(inputs, generate_options(12, 0.0), 0)
    assert looked.ids == again.ids
    with pytest.raises(ValueError, match="do not match"):
        model.generate(**inputs, prompt_lookup_num_tokens=10, max_new_tokens=12)


def test_judge_leaves_the_generator_alone():
    """Explaining a parting must not shift the noise of the prompts that follow."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    parting.sampling_noise((1, 10), 4, 9, torch.device("cpu"), torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def record(**changes):
    base = {"tokens": 11, "decode_tokens": 10, "rounds": 5, "decode_s": 1.0, "total_s": 2.0}
    return {**base, "prompt": "a", "kind": "known", **changes}


def test_rates_are_pooled():
    """Totals over totals, not means of ratios: a short answer must not weigh as much as a long one."""
    rows = [record(), record(decode_tokens=90, tokens=91, rounds=10, decode_s=1.0, total_s=1.0)]
    assert bench_report.decode_rate(rows) == 50
    assert bench_report.total_rate(rows) == pytest.approx(34)
    assert bench_report.tau(rows) == pytest.approx(100 / 15)


def test_interval_holds_the_ratio_and_narrows():
    """The bootstrap resamples pairs; with equal ratios everywhere its interval is a point."""
    plain = [record(decode_s=float(i + 1)) for i in range(8)]
    ours = [record(decode_s=(i + 1) / 2) for i in range(8)]
    assert bench_report.speedup_interval(plain, ours, bench_report.decode_rate) == pytest.approx([2.0, 2.0])
    noisy = [record(decode_s=(i + 1) / (1 + i % 3)) for i in range(8)]
    low, high = bench_report.speedup_interval(plain, noisy, bench_report.decode_rate)
    assert low < bench_report.decode_rate(noisy) / bench_report.decode_rate(plain) < high
    assert bench_report.speedup_interval(plain[:1], ours[:1], bench_report.decode_rate) is None


def test_distinct_measures():
    """Repeated n-grams and repeated answers lower the shares."""
    assert bench_report.distinct_ngrams([[1, 2, 3, 1, 2, 3]]) == pytest.approx(3 / 4)
    assert bench_report.distinct_share([[1], [1], [2]]) == pytest.approx(2 / 3)


def test_shipped_questions_keep_to_their_split():
    """`known` phrasings are verbatim in the training list, `new` ones in the held-out list and nowhere in training."""
    from dream_make.data.prompts import HELD_OUT, TRAIN

    shipped = json.loads(SHIPPED.read_text())
    assert len(shipped["known"]) == len(shipped["new"]) == 12
    assert set(shipped["known"]) <= set(TRAIN)
    assert set(shipped["new"]) <= set(HELD_OUT) and not set(shipped["new"]) & set(TRAIN)


def test_prompts_are_balanced_and_different(tmp_path):
    """Kinds take turns, every question comes once before any comes twice, no prompt twice, the seed fixes the order."""
    pictures = [tmp_path / f"{i}.png" for i in range(3)]
    for picture in pictures:
        picture.write_bytes(picture.name.encode())
    first = choose_prompts(24, pictures, None, seed=1)
    assert len({p.question for p in first}) == 24
    assert [p.kind for p in first[:4]] == ["known", "new", "known", "new"]
    many = choose_prompts(72, pictures, None, seed=1)
    assert many[:24] == first and len({p.key for p in many}) == 72
    assert choose_prompts(24, pictures, None, seed=2) != first
    with pytest.raises(UserError, match="more than"):
        choose_prompts(73, pictures, None, seed=1)


def test_questions_files(tmp_path):
    """Every documented form is read, anything else is one clear error."""
    text = tmp_path / "q.txt"
    text.write_text("One?\n\n Two? \n")
    assert [q for q, _, _ in read_questions(text)] == ["One?", "Two?"]
    data = tmp_path / "q.json"
    data.write_text(json.dumps([{"question": "A", "image": "x.png", "category": "conv"}, "B"]))
    assert read_questions(data) == [("A", "conv", "x.png"), ("B", "given", None)]
    for content in ("[1]", "{", "[]", '{"known": 3}', "7"):
        data.write_text(content)
        with pytest.raises(UserError):
            read_questions(data)
    with pytest.raises(UserError, match="cannot read"):
        read_questions(tmp_path / "absent.json")
