"""Needles in a haystack: passkeys and paths of names, hidden in texts of any length."""

from mezzo_drt.needles.hops import HopsConfig
from mezzo_drt.needles.passkey import PasskeyConfig
from mezzo_drt.needles.task import AbstractNeedleConfig, NeedleData, Riddle, Words

__all__ = [
    "AbstractNeedleConfig",
    "HopsConfig",
    "NeedleData",
    "PasskeyConfig",
    "Riddle",
    "Words",
]
