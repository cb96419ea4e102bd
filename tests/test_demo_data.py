"""The demo target's training data: isolated turns, splits that never mix, answers that agree with the picture."""

import random
from pathlib import Path

import pytest
import torch
from dream_make.data import prompts
from dream_make.data.charts import chart
from dream_make.data.mixture import Mixture, Pack, Turn
from dream_make.data.pictures import SIDE
from dream_make.data.scenes import scene
from dream_make.data.sources import Subject, is_held_out, load_subjects
from dream_make.data.texts import text_picture
from dream_make.packing import FOCUS_WEIGHT, pack_turns
from dream_make.target_eval import choice_by_likelihood, multiple_choice
from PIL import Image
from tiny import narrow_llama


def encode(text):
    return [3 + byte for byte in text.encode()]


PACK = Pack(
    "text", Image.new("RGB", (8, 8)), [Turn("What is it?", "A red apple.", ("apple",)), Turn("Color?", "It is red.")]
)


@pytest.mark.parametrize("kept", [None, torch.tensor([0, 2, 5])])
def test_packed_turns_are_isolated(kept):
    """Catches a turn that sees another turn, or positions that run on: each would train a conversation nobody has."""
    model = narrow_llama()
    packed = pack_turns(PACK, encode, 6, kept)
    alone = pack_turns(Pack("text", PACK.image, PACK.turns[1:]), encode, 6, kept)

    def run(p, mask):
        bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
        with torch.no_grad():
            return model.model(
                input_ids=p.ids[None], attention_mask=bias, position_ids=p.positions[None]
            ).last_hidden_state[0]

    length = len(alone.ids) - packed.visual.stop
    together, single = run(packed, packed.mask)[-length:], run(alone, alone.mask)[-length:]
    assert torch.allclose(together, single, atol=1e-5)
    leaking = torch.ones_like(packed.mask).tril()
    assert not torch.allclose(run(packed, leaking)[-length:], single, atol=1e-3)
    assert packed.positions[packed.visual].tolist() == [
        len(encode("<|im_start|>user\n")) + i for i in (range(6) if kept is None else kept.tolist())
    ]


def test_only_answers_are_supervised_and_focus_words_weigh_more():
    """Catches a loss on questions, a missing end token, or labels off by one."""
    packed = pack_turns(PACK, encode, 6)
    rows = packed.labels >= 0
    wanted = [*encode("A red apple."), 2, *encode("It is red."), 2]
    assert packed.labels[rows].tolist() == wanted
    following = torch.cat([packed.ids[1:], torch.tensor([-1])])
    assert torch.equal(packed.labels[rows], following[rows])
    assert packed.weights[rows][6:11].tolist() == [FOCUS_WEIGHT] * 5 and packed.weights[rows][0] == 1


def test_prompts_are_split_without_overlap():
    """Catches a held-out phrasing that slips into training, and placeholders that only some pictures can fill."""
    assert len(set(prompts.TRAIN)) == len(prompts.TRAIN) >= 80
    assert len(set(prompts.HELD_OUT)) == len(prompts.HELD_OUT) >= 20
    assert not {p.lower() for p in prompts.TRAIN} & {p.lower() for p in prompts.HELD_OUT}
    assert not any("{" in p for p in prompts.TRAIN + prompts.HELD_OUT)


def test_only_the_first_mention_of_a_name_weighs_more():
    """Catches weights that teach a long answer to say the name again and again."""
    packed = pack_turns(Pack("text", None, [Turn("?", "apple, apple", ("apple",))]), encode, 0)
    weights = packed.weights[packed.labels >= 0].tolist()
    assert weights == [FOCUS_WEIGHT] * 5 + [1.0] * 8


class Knows:
    """Stands for a target that prefers the answer with the given name, however likely or lettered."""

    def __init__(self, right):
        self.right, self.asked = right, []

    def likelihood(self, image, question, answers):
        self.asked.append(answers)
        return [-1.0 if self.right[image] in answer else -2.0 for answer in answers]

    def ask(self, pairs, new):
        names = [(self.right[image], question) for image, question in pairs]
        return [question[question.index(") " + name) - 1] for name, question in names]

    def text(self, ids):
        return ids


def test_four_way_choice_counts_what_is_right():
    """Catches options without the right name, a right name that always comes first, and misses counted as hits."""
    labelled = [(i, f"thing{i:02}") for i in range(30)]
    asker = Knows(dict(labelled))
    assert choice_by_likelihood(asker, labelled) == {"accuracy": 1.0, "count": 30}
    assert multiple_choice(asker, labelled)["accuracy"] == 1.0
    firsts = sum(
        options[0].lower().endswith(f"{name}.") for options, (_, name) in zip(asker.asked, labelled, strict=True)
    )
    assert all(len(set(options)) == 4 for options in asker.asked) and 0 < firsts < 30
    wrong = Knows({i: f"thing{(i + 1) % 30:02}" for i in range(30)})
    assert choice_by_likelihood(wrong, labelled)["accuracy"] < 0.5


def fake_subjects(folder: Path, count=60):
    subjects = []
    for index in range(count):
        path = folder / f"{index}.png"
        Image.new("RGBA", (40, 30), (index * 4 % 255, 90, 30, 255)).save(path)
        kind = ("photo", "drawing", "emoji")[index % 3]
        subjects.append(Subject(f"k:{index}", str(path), kind, f"thing {index}", "a thing", "things", index % 10 == 0))
    return subjects


def test_held_out_subjects_never_enter_the_mixture(tmp_path):
    """Catches held-out pictures in training packs, as subjects, in scenes or as wrong choices."""
    subjects = fake_subjects(tmp_path)
    shares = {"photo": 3, "drawing": 1, "emoji": 1, "scene": 2, "chart": 1, "text": 1, "text only": 1}
    answers = {s.key: [("Describe it.", f"Here is {s.name}.")] for s in subjects if not s.held_out}
    mixture = Mixture(subjects, answers, [("Hi?", "Hello.")], shares, 1)
    words = []
    for _ in range(150):
        pack = mixture.draw()
        assert pack.turns and (pack.image is None or pack.image.size == (SIDE, SIDE))
        words += [f"{turn.question} {turn.answer} " for turn in pack.turns]
    everything = " ".join(words).replace(".", " ").replace("?", " ").replace("things ", "thing ")
    held = [s.name for s in subjects if s.held_out]
    shown = [s.name for s in subjects if not s.held_out]
    assert not [name for name in held if f" {name} " in everything]
    assert len([name for name in shown if f" {name} " in everything]) > 30


def test_split_is_stable_and_of_the_stated_size():
    """Catches a split that moves between runs or machines (such as one by Python's salted hash)."""
    held = [is_held_out(f"photo:{i}") for i in range(4000)]
    assert 0.06 < sum(held) / len(held) < 0.10
    assert [i for i in range(120) if held[i]] == [1, 8, 59, 60, 101, 119]


def test_missing_sources_are_recorded(tmp_path, capsys):
    """Catches a recipe that pretends to have used a source that was not there."""
    subjects, record = load_subjects({"photos": str(tmp_path / "none"), "stamps": None})
    assert subjects == [] and [row["used"] for row in record] == [False] * 3
    assert "skipped" in capsys.readouterr().out


def test_drawn_answers_agree_with_the_picture(tmp_path):
    """Catches a chart whose highest value is not the one named, and pictures that depend on anything but the seed."""
    for seed in range(20):
        image, pairs = chart(random.Random(seed))
        answer = dict(pairs)["Which category is the highest?"]
        values = [int(part) for part in answer.replace(".", " ").split() if part.isdigit() and int(part) < 1900]
        assert values[0] >= values[-1] and image.size == (SIDE, SIDE)
        assert chart(random.Random(seed))[0].tobytes() == image.tobytes()
    drawn = fake_subjects(tmp_path)
    for make in (lambda rng: scene(drawn, rng), text_picture):
        image, pairs = make(random.Random(3))
        assert image.size == (SIDE, SIDE) and all(question and answer for question, answer in pairs)
