"""dream_ext: speculative decoding for vision-language models that never changes what the model says."""

from importlib import import_module

__version__ = "0.1.0"

# Loaded on first use: torch and transformers take seconds to import, and `dream-ext --help` needs neither.
_HOMES = {
    "Decoder": "dream_ext.generate",
    "Drafter": "dream_ext.drafter",
    "DrafterConfig": "dream_ext.drafter",
    "DrafterMismatch": "dream_ext.generate",
    "Stats": "dream_ext.stats",
    "TreeShape": "dream_ext.tree",
    "UnsupportedMode": "dream_ext.modes",
    "UnsupportedTarget": "dream_ext.targets.families",
    "Family": "dream_ext.targets.families",
    "attach": "dream_ext.generate",
    "prove_target": "dream_ext.targets.proof",
    "register_family": "dream_ext.targets.families",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'dream_ext' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
