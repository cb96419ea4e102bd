"""The drop-in: `Decoder.generate`, `attach` and a `custom_generate` callable, with `target.generate`'s own contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dream_ext import cache as kv
from dream_ext import compat
from dream_ext.decode import decode
from dream_ext.drafter import Drafter
from dream_ext.modes import UnsupportedMode, check_generators, check_mode, check_request, check_target
from dream_ext.noise import Sampler
from dream_ext.packed import PackedModels
from dream_ext.policy import suited_tree
from dream_ext.prefill import remember, run_prefill
from dream_ext.rounds import RoundsPool, check_drafts
from dream_ext.sampling import Chooser, Emitter, greedy
from dream_ext.stats import PhaseClock, Stats
from dream_ext.swapping import blank
from dream_ext.targets.adapter import Route, TargetAdapter
from dream_ext.targets.fingerprint import fingerprint
from dream_ext.tree import TreeShape


class DrafterMismatch(ValueError):
    """The drafter was made for another target; the message says what differs."""


class Decoder:
    """Decodes with a drafter, and says exactly what the target alone would have said.

    Args:
        target: a transformers model with `generate`; it is not modified.
        drafter: a `Drafter` made for it.
        tree: shape of the draft trees; the default is small and suits a CPU. "auto" chooses by the drafter's
            calibration and a few timed forwards, once per machine (see `dream_ext.policy`).
        visual_ratio: share of the picture positions the drafter reads, 0 to 1; the drafter's own by default.
        check_target: compare the target's fingerprint with the one the drafter was made for.
        pack: keep the weights of the text decoder's and the drafter's linear layers in a form that a CPU reads faster
            (see `dream_ext.packed`) until `restore`, or until the decoder is gone; decoders of one target share it.
            The drafter's are rounded to 8 bits, the target's keep every bit. Weights written in place meanwhile are not
            seen.
        forecast: when sampling, let the drafts read the noise that the coming choices will draw. It decides about speed
            alone: the text and the generator's state are the same without.
        route: how the target's layers attend to a tree, see `TargetAdapter.route`.
    Raises:
        UnsupportedTarget: a family that tree verification does not know.
        CannotPack: weights with gradients, hooks or adapters, or not float32 or bfloat16 on a CPU.
        DrafterMismatch: sizes or fingerprint differ.

    Attributes:
        stats: `Stats` of the last call, None before the first.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        *,
        tree: TreeShape | Literal["auto"] | None = None,
        visual_ratio: float | None = None,
        check_target: bool = True,
        pack: bool = False,
        forecast: bool = True,
        route: Route = "auto",
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.forecast = forecast
        self.visual_ratio = drafter.config.visual_ratio if visual_ratio is None else visual_ratio
        if not 0 <= self.visual_ratio <= 1:
            raise ValueError(f"visual_ratio must lie in [0, 1], got {self.visual_ratio}")
        self.adapter = TargetAdapter(target, route)
        _check_drafter(self.adapter, drafter, check_target)
        self._packed = PackedModels()
        finalize(self, self._packed.restore, wait=False).atexit = False
        if pack:
            self._packed.add(target, self.adapter.decoder, self.adapter.lm_head)
            self._packed.add(drafter, drafter, rounded=True)
        drafter.bind(self.adapter, pack)
        self.tree = suited_tree(self.adapter, drafter, pack) if tree == "auto" else tree or TreeShape()
        self._rounds = RoundsPool()
        self.stats: Stats | None = None

    @property
    def packed_extra_bytes(self) -> int:
        """Bytes of packed copies beside their originals: a head that is tied to the embedding, for one."""
        return self._packed.extra_bytes

    def restore(self) -> None:
        """Give the layers that `pack` packed their weights back, bit for bit, unless another decoder uses them packed.

        The decoder goes on working, at the speed of unpacked layers.
        """
        self._packed.restore()

    def generate(
        self, *args, generators: Sequence[torch.Generator] | None = None, **kwargs
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """`target.generate(*args, **kwargs)`, decoded with the drafter: same arguments, same results.

        Args:
            generators: when sampling, one for each sequence, on the target's device. A row of a batch then is what the
                target alone says to this prompt with the default generator in that state; without them the batch is
                what the target says to the same batch.
        Raises:
            UnsupportedMode: a mode that tree verification cannot reproduce (beams, guidance, ...).
        """
        with _swapped(self.target), _chosen(self, generators):
            return self.target.generate(*args, **kwargs)

    def custom_generate(
        self, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """For `target.generate(..., custom_generate=decoder.custom_generate)`.

        transformers hands neither the streamer nor the tokenizer to such a callable, so that `streamer=` and
        `stop_strings=` need `Decoder.generate` or `attach` instead.
        """
        if model is not self.target:
            raise DrafterMismatch("this decoder belongs to another model")
        check_mode(generation_config.get_generation_mode())
        return self._decode(input_ids, logits_processor, stopping_criteria, generation_config, None, model_kwargs)

    def _decode(self, input_ids, processors, criteria, config, streamer, model_kwargs):
        check_target(self.target)
        check_request(input_ids, processors, config, model_kwargs)
        cache = compat.cache_of(model_kwargs)
        chooser = self._chooser(input_ids, config, _GENERATORS.get())
        if len(input_ids) > 1:
            check_drafts(self.drafter, self.tree)
        emitter = Emitter(input_ids, processors, criteria, config, streamer, chooser)
        kv.adopt(cache)
        try:
            with _chosen(None):  # somebody's processor may call the target for a purpose of its own
                self._run(emitter, cache, input_ids, config, model_kwargs)
        finally:
            kv.release(cache)
        if streamer is not None:
            streamer.end()
        if not config.return_dict_in_generate:
            return emitter.input_ids
        return GenerateDecoderOnlyOutput(
            sequences=emitter.input_ids, scores=emitter.scores, logits=emitter.logits, **{compat.CACHE: cache}
        )

    def _chooser(self, input_ids: Tensor, config, generators: Sequence[torch.Generator] | None) -> Chooser:
        check_generators(generators, input_ids, config)
        if not config.do_sample:
            return greedy
        return Sampler(input_ids.device, config.temperature or 1.0, len(input_ids), generators, self.forecast)

    def _run(self, emitter: Emitter, cache, input_ids: Tensor, config, model_kwargs: dict) -> None:
        stats = self.stats = Stats(tree=self.tree, batch=len(input_ids))
        clock = PhaseClock(stats, self.adapter.device)
        try:
            with clock.phase("prefill"):
                prefill = run_prefill(
                    self.adapter, self.drafter, self.visual_ratio, input_ids, config, model_kwargs, stats
                )
            decode(prefill, emitter, self.tree, self._rounds, clock, stats)
        finally:
            stats.new_tokens = emitter.written
            clock.stop()
        remember(prefill)


@contextmanager
def attach(target: PreTrainedModel, drafter: Drafter, **options) -> Iterator[Decoder]:
    """Inside the block plain `target.generate(...)` decodes with the drafter, from every thread.

    Args:
        options: as for `Decoder`.
    """
    decoder = Decoder(target, drafter, **options)
    attached = _ATTACHED.setdefault(target, [])
    with _swapped(target):
        attached.append(decoder)
        try:
            yield decoder
        finally:
            attached.remove(decoder)
            decoder.restore()


def _check_drafter(adapter: TargetAdapter, drafter: Drafter, compare: bool) -> None:
    config = drafter.config
    for name, ours, theirs in (
        ("hidden size", config.hidden_size, adapter.hidden_size),
        ("vocabulary", config.vocab_size, adapter.vocab_size),
    ):
        if ours != theirs:
            raise DrafterMismatch(
                f"the drafter's {name} is {ours}, the target's is {theirs}: wrong drafter for this target"
            )
    if compare and config.target_fingerprint and fingerprint(adapter.model) != config.target_fingerprint:
        raise DrafterMismatch(
            f"the drafter was trained for '{config.target_name}' with other weights than this target's;"
            " train one for it, or pass check_target=False"
        )


# `generate` looks `_sample` up on the model's class.  While a decoder is at work its target's class is a subclass with
# our `_sample`, which asks whose call this is: a decoder's own, an attached model's, or a plain one of another thread.
_CHOSEN: ContextVar[Decoder | None] = ContextVar("dream_ext_decoder", default=None)
_GENERATORS: ContextVar[Sequence[torch.Generator] | None] = ContextVar("dream_ext_generators", default=None)
_ATTACHED: WeakKeyDictionary[PreTrainedModel, list[Decoder]] = WeakKeyDictionary()
_SWAPS: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
_LOCK = threading.Lock()
_HOOKED: dict[type, type] = {}


@contextmanager
def _chosen(decoder: Decoder | None, generators: Sequence[torch.Generator] | None = None) -> Iterator[None]:
    tokens = _CHOSEN.set(decoder), _GENERATORS.set(generators)
    try:
        yield
    finally:
        _CHOSEN.reset(tokens[0])
        _GENERATORS.reset(tokens[1])


def _active(model: PreTrainedModel) -> Decoder | None:
    chosen = _CHOSEN.get()
    if chosen is not None and chosen.target is model:
        return chosen
    attached = _ATTACHED.get(model)
    return attached[-1] if attached else None


@contextmanager
def _swapped(model: PreTrainedModel) -> Iterator[None]:
    """The hooked class on `model`, counted, so that overlapping decoders of several threads share it."""
    with _LOCK:
        if not _SWAPS.get(model):
            model.__class__ = _hooked(type(model))
        _SWAPS[model] = _SWAPS.get(model, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            _SWAPS[model] -= 1
            if not _SWAPS[model]:
                del _SWAPS[model]
                model.__class__ = type(model).__bases__[0]


def _hooked(cls: type) -> type:
    """A subclass of the target's class whose `generate` asks `_active` whose call it serves."""
    if cls not in _HOOKED:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _HOOKED[cls] = type(cls.__name__, (cls,), names | _hooks(cls))
    return _HOOKED[cls]


def _hooks(base: type) -> dict[str, Callable]:
    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **model_kwargs,
    ):
        """In place of `GenerationMixin._sample`, with its signature: `generate` inspects it."""
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        decoder = _active(self)
        if decoder is None:
            return base._sample(self, *arguments, synced_gpus, streamer, **model_kwargs)
        if synced_gpus:
            raise UnsupportedMode("synced_gpus (sharded decoding) is not supported: decode with the target alone")
        return decoder._decode(*arguments, streamer, model_kwargs)

    def _validate_generation_mode(self, generation_mode, *args, **kwargs):
        if _active(self) is not None:
            check_mode(generation_mode)
        return base._validate_generation_mode(self, generation_mode, *args, **kwargs)

    def _get_deprecated_gen_repo(self, generation_mode, *args, **kwargs):
        """Asked before the mode is validated; answers modes that left transformers with advice that would not help."""
        if _active(self) is not None:
            check_mode(generation_mode)
        return base._get_deprecated_gen_repo(self, generation_mode, *args, **kwargs)

    def generate_batch(self, *args, **kwargs):
        if _active(self) is not None:
            raise UnsupportedMode("continuous batching (generate_batch, cache_implementation='paged') is not supported")
        return base.generate_batch(self, *args, **kwargs)

    def __reduce_ex__(self, protocol):
        """Copies and pickles are of the target's own class."""
        _, _, *state = base.__reduce_ex__(self, protocol)
        return (blank, (base,), *state)

    hooks = (_sample, _validate_generation_mode, _get_deprecated_gen_repo, generate_batch, __reduce_ex__)
    return {hook.__name__: hook for hook in hooks}
