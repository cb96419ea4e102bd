"""The law of sampled acceptance, by exact enumeration on five tokens: no statistics, no tolerance but rounding."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from dream_ext.sampling import Emitter, walk
from dream_ext.tree import Tree

VOCAB, NEW = 5, 4
PROMPT = (1, 3)

PROCESSORS = {
    "plain": [],
    "temperature_top_p": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)],
    "top_k": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(3)],
    "repetition": [RepetitionPenaltyLogitsProcessor(1.5)],
}


def target_logits(prefix: tuple[int, ...]) -> torch.Tensor:
    """A toy target: random logits that depend on the whole prefix."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(prefix) & 0x7FFFFFFF)) * 1.5


def criteria(eos: bool) -> StoppingCriteriaList:
    stops = StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + NEW)])
    if eos:
        stops.append(EosTokenCriteria(eos_token_id=4))
    return stops


def target_law(processors: LogitsProcessorList, eos: bool) -> dict[tuple[int, ...], float]:
    """The product law of plain sampling over all texts."""
    law: dict[tuple[int, ...], float] = {}

    def extend(text: tuple[int, ...], p: float) -> None:
        if len(text) == len(PROMPT) + NEW or (eos and text[-1] == 4 and len(text) > len(PROMPT)):
            law[text] = law.get(text, 0.0) + p
            return
        scores = processors(torch.tensor([text]), target_logits(text)[None])
        for token, q in enumerate(torch.softmax(scores.double(), -1)[0].tolist()):
            if q > 0:
                extend((*text, token), p * q)

    extend(PROMPT, 1.0)
    return law


class Replay:
    """Chooses as told and keeps the probability of having done so; then takes the first possible token."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.options, self.p = script, [], [], 1.0

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        q = torch.softmax(scores.double(), -1)[0]
        possible = [t for t in range(VOCAB) if q[t] > 0]
        step = len(self.taken)
        token = self.script[step] if step < len(self.script) else possible[0]
        self.taken.append(token)
        self.options.append(possible)
        self.p *= float(q[token])
        return torch.tensor([token])


def random_tree(rng: random.Random, root: int) -> Tree:
    nodes = rng.randint(1, 9)
    parents = [-1, *(rng.randrange(i) for i in range(1, nodes))]
    tokens = [root]
    for parent in parents[1:]:
        used = {tokens[i] for i, p in enumerate(parents[: len(tokens)]) if p == parent}
        free = [t for t in range(VOCAB) if t not in used]
        tokens.append(rng.choice(free) if free else rng.randrange(VOCAB))
    return Tree.from_parents(torch.tensor(tokens), torch.tensor(parents))


def node_logits(tree: Tree, prefix: tuple[int, ...]) -> torch.Tensor:
    """What a verify forward returns: the target's logits after every node's own path; `prefix` ends with the root."""
    texts = [prefix]
    for node in range(1, tree.nodes):
        texts.append((*texts[int(tree.parents[node])], int(tree.tokens[node])))
    return torch.stack([target_logits(text) for text in texts])


def run(script: list[int], processors, eos: bool, seed: int, walker) -> tuple[tuple[int, ...], Replay]:
    """One text through the product's emitter and walk, with trees that depend on the seed and the prefix alone."""
    chooser = Replay(script)
    config = GenerationConfig(return_dict_in_generate=False)
    emitter = Emitter(torch.tensor([PROMPT]), processors, criteria(eos), config, None, chooser)
    emitter.emit(target_logits(PROMPT))
    while not emitter.done:
        prefix = tuple(emitter.input_ids[0].tolist())
        tree = random_tree(random.Random(hash((seed, prefix))), prefix[-1])
        path: list[int] = []
        walker(tree, node_logits(tree, prefix), emitter, path)
        text = emitter.input_ids[0, len(prefix) :].tolist()
        assert [int(tree.tokens[node]) for node in path[1:]] == text[:-1], "the path is not the text that was emitted"
    return tuple(emitter.input_ids[0].tolist()), chooser


def emitted_law(processors, eos: bool, seed: int, walker=walk) -> dict[tuple[int, ...], float]:
    """Depth-first over all choices the chooser may be asked for."""
    law: dict[tuple[int, ...], float] = {}
    pending = [[]]
    while pending:
        script = pending.pop()
        text, chooser = run(script, processors, eos, seed, walker)
        law[text] = law.get(text, 0.0) + chooser.p
        for step in range(len(script), len(chooser.taken)):
            others = [t for t in chooser.options[step] if t != chooser.taken[step]]
            pending += [[*chooser.taken[:step], token] for token in others]
    return law


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("name", PROCESSORS)
def test_emitted_law_is_the_targets(name, eos):
    """Residuals, coins, draft probabilities or another bonus distribution would each move some text's probability."""
    processors = LogitsProcessorList(PROCESSORS[name])
    want = target_law(processors, eos)
    assert abs(sum(want.values()) - 1) < 1e-12
    for seed in range(3):
        got = emitted_law(processors, eos, seed)
        assert got.keys() == want.keys()
        assert max(abs(got[text] - want[text]) for text in want) < 1e-12


def raw_bonus(tree: Tree, logits: torch.Tensor, emitter: Emitter, path: list[int]) -> None:
    """The known bug: the token that ends a round comes from the raw softmax instead of the processed distribution."""
    node, processed = 0, emitter.processors
    while node is not None:
        path.append(node)
        if int(tree.parents.eq(node).sum()) == 0:
            emitter.processors = LogitsProcessorList()
        token = emitter.emit(logits[node])
        emitter.processors = processed
        node = None if emitter.done else tree.child(node, token)


@pytest.mark.parametrize("name", ["temperature_top_p", "top_k", "repetition"])
def test_the_enumeration_catches_a_raw_bonus(name):
    processors = LogitsProcessorList(PROCESSORS[name])
    want, got = target_law(processors, False), emitted_law(processors, False, 0, raw_bonus)
    assert max(abs(got.get(text, 0.0) - want.get(text, 0.0)) for text in want.keys() | got.keys()) > 1e-3


def test_same_draw_as_multinomial_of_noise():
    """`multinomial` of one sample is argmax(p / e), e exponential: the law the whole design rests on."""
    for seed, size in itertools.product(range(5), (7, 49152)):
        p = torch.softmax(torch.randn(1, size, generator=torch.Generator().manual_seed(seed)), -1)
        torch.manual_seed(seed)
        token = torch.multinomial(p, 1)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        noise = torch.empty_like(p).exponential_()
        assert int((p / noise).argmax()) == int(token)
        assert torch.equal(state, torch.get_rng_state())
