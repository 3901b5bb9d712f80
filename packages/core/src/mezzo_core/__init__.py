"""Shared operators, language-model parts and training of the mezzo packages."""

__version__ = "0.1.0"
