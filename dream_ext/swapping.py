"""Instances whose class is exchanged for a while, and copies of them that are of the original class."""

from __future__ import annotations


def blank(cls: type) -> object:
    """An instance of ``cls`` for unpickling to fill; unlike `copyreg.__newobj__`, of another class than the pickled."""
    return cls.__new__(cls)
