"""Making a drafter: collection, samples, losses, training and evaluation, end to end on a tiny random target."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch

from dream_ext.drafter import Drafter, DrafterConfig
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.tree import TreeShape

pytest.importorskip("dream_ext._C", reason="the compiled operators are not built")

from dream_make.answer import Answerer, AnswerOptions
from dream_make.collect import collect, load_target
from dream_make.data.prompts import HELD_OUT
from dream_make.evaluate import Tally, evaluate, evaluate_grid, overlap
from dream_make.jobs import PromptBuilder, difference_hash
from dream_make.losses import kl_loss
from dream_make.provenance import data_hashes
from dream_make.questions import compose, normalised
from dream_make.recipe import CollectRecipe, EvaluateRecipe, Recipe, TrainRecipe
from dream_make.samples import build_sample
from dream_make.tiny_target import make_tiny_target
from dream_make.train import Trainer, begin_from, choose_vocab, train, turn_groups
from dream_make.turns import Job, Question, ShardWriter, read_packs

RECIPES = Path(__file__).parent.parent / "python" / "recipes"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def collection(tiny, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data")
    summary = collect(small_collection(), str(tiny), out)
    assert summary["packs"] == 8
    assert summary["eval_packs"] == 2
    return out


def small_collection(**changes) -> CollectRecipe:
    sizes = {"minutes": 30.0, "processes": 1, "packs": 6, "groups": 4, "slots": 3, "questions": 3, "max_new_tokens": 10}
    limits = {
        "prefix_capacity": 64,
        "question_capacity": 200,
        "eval_pictures": 2,
        "eval_questions": 1,
        "random_pictures": 28,
    }
    return CollectRecipe(**{**sizes, **limits, **changes})


def open_target(folder: Path) -> tuple[TargetAdapter, PromptBuilder]:
    model, processor = load_target(str(folder), torch.float32)
    return TargetAdapter(model), PromptBuilder(processor)


def test_collected_answers_are_the_targets_own(tiny, collection):
    """Catches a mask that shows a turn its neighbour, a position off by one, features of the wrong row, a lost
    token."""
    adapter, _ = open_target(tiny)
    checked = 0
    for pack in read_packs(collection):
        for index, turn in enumerate(pack.turns):
            ids = torch.cat([pack.ids[: pack.prefix], pack.ids[turn.start : turn.end]]).long()[None]
            embeds = adapter.embed(ids).clone()
            embeds[0, pack.visual[0] : pack.visual[1]] = pack.embeds.float()
            with torch.no_grad():
                hidden = adapter.decoder(inputs_embeds=embeds).last_hidden_state[0]
            stored = torch.cat([pack.feats[: pack.prefix], pack.feats[turn.start : turn.end]]).float()
            torch.testing.assert_close(stored, hidden, rtol=0.03, atol=0.03)
            logits = adapter.lm_head(hidden[pack.prefix + turn.asked - 1 :])
            offset = sum(len(t.supervised) for t in pack.turns[:index])
            torch.testing.assert_close(
                pack.lse[offset : offset + len(turn.supervised)], logits.logsumexp(-1), rtol=1e-2, atol=2e-2
            )
            if turn.temperature == 0:
                answer = [*pack.ids[turn.start + turn.asked : turn.end].tolist(), turn.last]
                picked = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
                assert (logits.amax(-1) - picked).max() < 0.05  # the picture's embeddings are stored in bf16
                checked += 1
    assert checked > 10


def test_a_shared_prefix_gives_what_generate_gives(tiny):
    """Catches attention that mixes rows, groups or leftovers of an earlier turn: many turns through few slots,
    exactly."""
    adapter, prompts = open_target(tiny)
    questions = ["Why?", "Describe this picture.", "What is it?", "Tell me more.", "Who?"]
    inputs, tails = prompts.build(_noise_picture(), questions)
    lone, lone_tails = prompts.build(None, questions)
    jobs = [
        Job("a", "train", "", inputs, [Question(q, t) for q, t in zip(questions, tails, strict=True)]),
        Job("b", "train", "", lone, [Question(q, t) for q, t in zip(questions, lone_tails, strict=True)]),
    ]
    packs = []
    options = AnswerOptions(groups=1, slots=2, max_new_tokens=10, prefix_capacity=64, question_capacity=64, taps=(0,))
    assert Answerer(adapter, options).run(iter(jobs), packs.append, time.monotonic() + 60)
    for pack, job in zip(packs, jobs, strict=True):
        assert pack.taps.shape == (len(pack.ids), adapter.hidden_size)
        for turn in pack.turns:
            question = next(q for q in job.questions if q.text == turn.text)
            ids = torch.cat([job.inputs["input_ids"], torch.tensor([question.ids])], dim=1)
            extra = {"pixel_values": job.inputs["pixel_values"]} if "pixel_values" in job.inputs else {}
            with torch.no_grad():
                whole = adapter.model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), **extra, max_new_tokens=10, do_sample=False
                )
            got = [*pack.ids[turn.start + turn.asked : turn.end].tolist(), turn.last]
            assert got == whole[0, ids.shape[1] :].tolist()


def _noise_picture():
    from PIL import Image

    generator = torch.Generator().manual_seed(4)
    return Image.fromarray(torch.randint(0, 256, (28, 28, 3), generator=generator, dtype=torch.uint8).numpy())


def test_a_killed_collection_resumes_without_loss_or_repeats(tiny, tmp_path):
    """Catches half-written shards that count, and packs that are answered twice."""
    whole = small_collection(packs=5, eval_pictures=1)
    collect(small_collection(packs=2, eval_pictures=1), str(tiny), tmp_path)
    (tmp_path / "part0-0007.safetensors").write_bytes(b"half")
    collect(whole, str(tiny), tmp_path)
    keys = [pack.key for pack in read_packs(tmp_path)]
    assert sorted(keys) == ["eval:0", "train:0", "train:1", "train:2", "train:3", "train:4"]
    assert collect(whole, str(tiny), tmp_path)["packs"] == 6


def test_unfinished_packs_keep_their_finished_turns(tiny):
    adapter, prompts = open_target(tiny)
    inputs, tails = prompts.build(_noise_picture(), ["A?", "B?"])
    jobs = [Job("a", "train", "", inputs, [Question("A?", tails[0]), Question("B?", tails[1])])]
    packs = []
    options = AnswerOptions(groups=1, slots=1, max_new_tokens=4, prefix_capacity=64, question_capacity=64)
    answerer = Answerer(adapter, options)
    step = answerer._step

    def one_turn_then_slow(done):
        step(done)
        if answerer.groups[0] is not None and answerer.groups[0].parts:
            time.sleep(1.0)

    answerer._step = one_turn_then_slow
    assert not answerer.run(iter(jobs), packs.append, time.monotonic() + 0.9)
    assert [turn.text for turn in packs[0].turns] == ["A?"]


def test_the_supervised_rows_decode_to_the_answer(tiny, collection):
    """Catches a loss mask that is one token off, in the pack and in the sample made from it."""
    adapter, _ = open_target(tiny)
    for pack in read_packs(collection)[:3]:
        turns = list(range(len(pack.turns)))
        sample = build_sample(pack, turns, 0.5, adapter.embed)
        visual = pack.visual[1] - pack.visual[0]
        assert len(sample.positions) == len(pack.ids) - visual // 2
        with torch.no_grad():
            chosen = adapter.lm_head(sample.target.float())
        start = 0
        for turn in pack.turns:
            answer = torch.tensor([*pack.ids[turn.start + turn.asked : turn.end].tolist(), turn.last])
            rows = sample.rows[start : start + len(answer)]
            text = adapter.embed(answer[:-1])
            torch.testing.assert_close(sample.embeds[rows[1:]], text)
            if turn.temperature == 0:
                got = chosen[start : start + len(answer)]
                assert (got.amax(-1) - got.gather(1, answer[:, None])[:, 0]).max() < 0.3  # features are stored in bf16
            assert sample.positions[rows[0]] == pack.prefix + turn.asked - 1
            start += len(answer)


def test_packed_turns_equal_turns_alone(tiny, collection):
    """Catches a first row that reads the previous turn's feature, and a mask that leaks."""
    adapter, _ = open_target(tiny)
    pack = read_packs(collection, "train")[0]
    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig.for_target(adapter, "x")).double()
    embed = torch.nn.Embedding.from_pretrained(adapter.embed.weight.double())
    packed = build_sample(pack, [0, 1], 1.0, embed)
    alone = build_sample(pack, [1], 1.0, embed)
    outs = [drafter.unroll(s.embeds, s.feats, s.positions, s.base, s.rows, 3) for s in (packed, alone)]
    n = len(alone.rows)
    for many, one in zip(*outs, strict=True):
        assert torch.equal(many.valid[-n:], one.valid)
        torch.testing.assert_close(many.hidden[-n:][one.valid], one.hidden[one.valid], rtol=0, atol=1e-9)


def test_kl_is_summed_over_the_vocabulary():
    """Catches a mean over the vocabulary, and a target that is renormalised over the draft vocabulary."""
    target, draft = torch.randn(5, 11), torch.randn(5, 11)
    lse = target.logsumexp(-1)
    want = torch.nn.functional.kl_div(
        draft.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(kl_loss(draft, target, lse), want)
    assert kl_loss(target, target, lse).abs() < 1e-6
    part = kl_loss(draft[:, :4], target[:, :4], lse)
    p = (target - lse[:, None]).exp()[:, :4]
    torch.testing.assert_close(part, (p * (p.log() - draft[:, :4].log_softmax(-1))).sum(-1).mean())


def test_training_lowers_the_loss_resumes_and_writes_a_drafter(tiny, collection, tmp_path):
    """Catches a gradient that does not arrive, an optimizer state that is lost, a drafter that cannot be loaded."""
    plan = TrainRecipe(
        minutes=0.08, threads=1, rows=300, lr=3e-3, warm_up=5, draft_vocab=100, save_minutes=0.02, eval_packs=1
    )
    recipe = Recipe(CollectRecipe(), plan, EvaluateRecipe(depth=3, threads=1), {"visual_ratio": 0.5})
    first = Trainer(recipe, str(tiny), collection, tmp_path)
    sample = build_sample(first.packs[0], [0, 1], 0.5, first.adapter.embed)
    before = first.loss(sample, 3)[0].item()
    report = first.run()
    assert first.loss(sample, 3)[0].item() < 0.8 * before
    assert report["tau"]["all"]["rounds"] > 0
    drafter = Drafter.from_pretrained(tmp_path / "drafter", dtype=torch.float32)
    assert drafter.config.visual_ratio == 0.5
    assert drafter.config.target_fingerprint == json.loads((collection / "target.json").read_text())["fingerprint"]
    origin = json.loads((tmp_path / "drafter" / "provenance.json").read_text())
    assert origin["data"]["packs"] == 6
    second = Trainer(recipe, str(tiny), collection, tmp_path)
    second._resume()
    assert second.optimizer.step_count == first.optimizer.step_count
    for a, b in zip(first.optimizer.masters, second.optimizer.masters, strict=True):
        assert torch.equal(a, b)
    assert second.spent >= 60 * plan.minutes


def test_the_first_block_can_be_trained_alone_before(tiny, collection, tmp_path):
    """Catches a continuation that forgets the shallow start, and one that trains it again after a restart."""
    plan = TrainRecipe(
        minutes=0.02, shallow_minutes=0.04, threads=1, rows=300, warm_up=5, draft_vocab=100, eval_packs=1
    )
    recipe = Recipe(CollectRecipe(), plan, EvaluateRecipe(depth=3, threads=1), {})
    train(recipe, str(tiny), collection, tmp_path)
    shallow = Drafter.from_pretrained(tmp_path / "shallow" / "drafter")
    deep = Drafter.from_pretrained(tmp_path / "drafter")
    assert (shallow.config.blocks, deep.config.blocks) == (("self",), ("self", "cross", "self"))
    change = (deep.blocks[0].down.weight - shallow.blocks[0].down.weight).float().norm()
    assert change < 0.5 * shallow.blocks[0].down.weight.float().norm()
    steps = json.loads((tmp_path / "shallow" / "state.json").read_text())["step"]
    train(recipe, str(tiny), collection, tmp_path)
    assert json.loads((tmp_path / "shallow" / "state.json").read_text())["step"] == steps


@pytest.mark.parametrize(
    "changes", [{"blocks": ("self",)}, {"fusion": "none"}, {"blocks": ("cross", "cross"), "cross_rope": True}]
)
def test_every_variant_trains(tiny, collection, tmp_path, changes):
    """Catches a parameter without gradient."""
    recipe = Recipe(CollectRecipe(), TrainRecipe(threads=1, draft_vocab=50), EvaluateRecipe(), changes)
    trainer = Trainer(recipe, str(tiny), collection, tmp_path)
    with torch.no_grad():
        for p in trainer.net.parameters():
            if p.dim() == 0:
                p.fill_(0.3)
    trainer.loss(build_sample(trainer.packs[0], [0], 0.75, trainer.adapter.embed), 3)[0].backward()
    for name, p in trainer.net.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def test_a_deeper_drafter_starts_as_the_shallow_one(tiny, collection):
    """Catches added blocks that disturb what was learned, and refuses a start that does not fit."""
    adapter, _ = open_target(tiny)
    shallow = Drafter(DrafterConfig.for_target(adapter, "x", blocks=("self",)))
    deep = Drafter(DrafterConfig.for_target(adapter, "x"))
    begin_from(deep, shallow)
    s = build_sample(read_packs(collection, "train")[0], [0], 0.75, adapter.embed)
    outs = [net.unroll(s.embeds, s.feats.float(), s.positions, s.base, s.rows, 3)[2].hidden for net in (shallow, deep)]
    torch.testing.assert_close(outs[1], outs[0])
    with pytest.raises(ValueError, match="cannot start"):
        begin_from(shallow, deep)


def test_a_perfect_drafter_has_the_highest_tau_and_a_blind_guess_has_one(tiny, collection):
    """Catches a replay that is off by one: with every token drafted right, tau is depth + 1; with none, 1."""
    adapter, _ = open_target(tiny)
    tally = Tally()
    for _ in range(3):
        tally.add(4, 4)
    assert tally.tau == 5.0
    assert tally.to_dict()["accepted_per_depth"] == [1.0, 1.0, 1.0, 1.0]
    torch.manual_seed(1)
    drafter = Drafter(DrafterConfig.for_target(adapter, "x", draft_vocab_size=2)).requires_grad_(False)
    drafter.draft_vocab = torch.tensor([1, 2])  # special tokens that no answer holds
    drafter.bind(adapter)
    tallies = evaluate(drafter, adapter, read_packs(collection, "eval"), TreeShape(2, 2, 6))
    assert tallies["all"].tau == 1.0
    assert tallies["known"].rounds > 0
    assert tallies["new"].rounds > 0


def test_a_grid_judges_every_tree_as_if_alone(tiny, collection):
    """Catches a smaller tree of the grid that keeps levels or nodes of the largest one."""
    adapter, _ = open_target(tiny)
    torch.manual_seed(2)
    drafter = Drafter(DrafterConfig.for_target(adapter, "x")).requires_grad_(False)
    drafter.bind(adapter)
    packs = read_packs(collection, "eval")
    grid = evaluate_grid(drafter, adapter, packs, 3, [1, 3], [2, 4, 8])
    largest = TreeShape(3, 3, 8)
    assert grid[largest] == evaluate(drafter, adapter, packs, largest)["all"]
    assert len({tally.rounds for tally in grid.values()}) == 1 and grid[largest].rounds > 0
    for depth in (1, 3):
        taus = [grid[TreeShape(3, depth, nodes)].tau for nodes in (2, 4, 8)]
        assert taus == sorted(taus) and taus[0] >= 1 and taus[-1] <= depth + 1
    assert len(grid[TreeShape(3, 1, 8)].reached) == 1


def test_overlapping_evaluation_data_is_found(collection):
    held, trained = read_packs(collection, "eval"), read_packs(collection, "train")
    assert overlap(held, data_hashes(trained)) == []
    assert overlap(held, data_hashes(trained + held[:1])) == [held[0].key]


def test_the_draft_vocabulary_is_the_most_frequent_answer_tokens(collection):
    packs = read_packs(collection, "train")
    vocab, coverage = choose_vocab(packs, 20, 259, (1, 2))
    assert len(vocab) == 20
    assert (vocab[1:] > vocab[:-1]).all()
    assert not {1, 2} & set(vocab.tolist())
    full, all_of_it = choose_vocab(packs, 257, 259, (1, 2))
    assert len(full) == 257
    assert all_of_it == 1.0
    assert coverage < all_of_it


def test_every_turn_is_in_an_epoch_once(collection):
    packs = read_packs(collection, "train")
    groups = turn_groups(packs, 120, random.Random(0), 0.75)
    found = sorted((i, t) for i, turns in groups for t in turns)
    assert found == [(i, t) for i, pack in enumerate(packs) for t in range(len(pack.turns))]


def test_composed_questions_are_many_and_never_held_out():
    rng = random.Random(0)
    asked = {normalised(compose(rng)) for _ in range(3000)}
    assert len(asked) > 2000
    assert not asked & {normalised(q) for q in HELD_OUT}


def test_difference_hashes_tell_pictures_apart_and_forgive_resizing():
    picture = _noise_picture().resize((200, 160))
    assert (difference_hash(picture) ^ difference_hash(picture.resize((100, 80)))).bit_count() <= 4
    assert (difference_hash(picture) ^ difference_hash(picture.rotate(180))).bit_count() > 10


def test_recipes_are_read_and_wrong_keys_refused(tmp_path):
    for path in RECIPES.glob("*.toml"):
        if path.name != "demo.toml":
            Recipe.read(path)
    bad = tmp_path / "bad.toml"
    bad.write_text("[train]\nminuets = 3\n")
    with pytest.raises(ValueError, match="minuets"):
        Recipe.read(bad)


def test_a_shard_is_whole_or_absent(collection, tmp_path):
    packs = read_packs(collection)
    writer = ShardWriter(tmp_path, "x", per_shard=2)
    for pack in packs[:3]:
        writer.add(pack)
    assert len(read_packs(tmp_path)) == 2
    assert ShardWriter(tmp_path, "x").done == {packs[0].key, packs[1].key}
    again = read_packs(tmp_path)[0]
    assert torch.equal(again.feats, packs[0].feats)
    assert again.turns == packs[0].turns
