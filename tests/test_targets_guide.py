"""docs/targets.md: its lines run, its table is the code's, and what it says of new families holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from relatives import RELATIVES, inputs_of, made, spoken, text
from test_docs import blocks
from tiny import random_drafter
from tiny_inputs import prompt
from tiny_targets import BOS, VOCAB, build
from tiny_targets import FAMILIES as TARGETS

from dream_ext import Decoder, Family, UnsupportedTarget, prove_target, register_family
from dream_ext.targets import families
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.verify import has_route

GUIDE = Path(__file__).parent.parent / "docs" / "targets.md"
LINES = re.findall(r"^\| (.+?) \| `(\w+)\.from_pretrained\((\".+?\")\)` \| (.+?) \|", GUIDE.read_text(), re.MULTILINE)


def tiny_of(name: str):
    """(model, inputs) for a row of the guide's table."""
    family = "pixtral" if name.startswith("Pixtral") else name.strip("`")
    if family in TARGETS:
        model = build(family)
        return model, prompt(family, model, "image")
    return RELATIVES[family]("sdpa")


class Ready(dict):
    """What a processor returns."""

    def to(self, device):
        return self


@pytest.mark.parametrize("name, cls, checkpoint, extras", LINES, ids=[line[0].strip("`") for line in LINES])
def test_every_line_of_the_table_runs(name, cls, checkpoint, extras, tmp_path):
    """Catches a class that does not load the family, and inputs that the table forgets."""
    model, inputs = tiny_of(name)
    model.save_pretrained(tmp_path)
    target = getattr(transformers, cls).from_pretrained(str(tmp_path))
    assert type(target) is type(model)
    more = set(inputs) - {"input_ids", "attention_mask"}
    assert more <= set(re.findall(r"\w+", extras)), more

    class processor:
        apply_chat_template = staticmethod(lambda chat, **kwargs: Ready(inputs))

    names = {"Decoder": Decoder, "target": target, "drafter": random_drafter(target)}
    names |= {"processor": processor, "chat": []}
    exec(blocks(GUIDE, "python")[0], names)
    want = model.generate(**inputs, max_new_tokens=20)
    assert torch.equal(names["ids"], want)


def test_the_table_has_every_family():
    """Catches a family that the code knows and the guide does not, or the other way round."""
    outer = {name.strip("`") for name, *_ in LINES} - {"Pixtral, a `llava"}
    assert outer == {name for name, family in families.FAMILIES.items() if family.mask is None}
    named = re.search(r"^Text decoders, alone .*: (.*)\.$", GUIDE.read_text(), re.MULTILINE)[1]
    decoders = {name for name, family in families.FAMILIES.items() if family.mask is not None}
    inside = {name for name in decoders if name.endswith("_text") and name != "gemma3_text"}
    assert set(re.findall(r"`(\w+)`", named)) == decoders - inside


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))


def strange() -> tuple:
    """A family that the table does not know: other names of layers, a head that is no `lm_head`."""
    model = made("GPTNeoXForCausalLM", text("gpt_neox"), "sdpa")
    return model, inputs_of([BOS, *spoken(20)])


def test_a_family_is_added_in_a_few_lines(table, capsys):
    """Catches a public way in that is not enough, and an error that leads nowhere."""
    target, inputs = strange()
    with pytest.raises(UnsupportedTarget, match=r"'gpt_neox'.*docs/targets\.md.*register_family"):
        TargetAdapter(target)
    lines = blocks(GUIDE, "python")[1]
    assert len(lines.splitlines()) <= 30
    adding, using = lines.split("\n\nproof", 1)
    names = {"target": target, "inputs": inputs}
    exec(adding, names)
    names["drafter"] = random_drafter(target)
    exec("proof" + using, names)
    assert "from plain decoding's" in capsys.readouterr().out
    assert torch.equal(names["ids"], target.generate(**inputs, max_new_tokens=20))
    assert has_route(TargetAdapter(target, route="tree"))


def test_entries_are_not_overwritten(table):
    """Catches a typing error that changes a known family, or one without meaning."""
    with pytest.raises(ValueError, match="replace=True"):
        register_family(Family("llama", "dict"))
    register_family(Family("llama", "dict"), replace=True)
    with pytest.raises(ValueError, match="mask is"):
        register_family(Family("martian", "matrix"))


def test_a_wrong_entry_does_not_prove(table):
    """The proof must see what it is there for, here a window that is not said."""
    model = build("mistral_window")
    inputs = prompt("mistral_window", model, "long")
    right = prove_target(model, inputs, route="mask")
    assert right.error < 1e-5 * right.scale and right.plain_head
    register_family(Family("mistral", "tensor"), replace=True)
    wrong = prove_target(model, inputs, route="mask")
    assert wrong.error > 1e-2 * wrong.scale


def test_placeholders_of_a_new_family_are_never_drafted(table):
    """Catches fields of an entry that nobody reads."""
    model = build("llava")
    model.config.separator_id = 42
    register_family(Family("llava", placeholders=("pad_token_id", "separator_id")), replace=True)
    assert 42 in TargetAdapter(model).placeholder_ids
    register_family(Family("llava", features=("separator_id",), decoder="model.language_model"), replace=True)
    adapter = TargetAdapter(model)
    assert adapter.visual_ids == (42,) and adapter.decoder is model.model.language_model
    assert adapter.vocab_size == VOCAB
