"""Shared operators, language-model parts and training of the mezzo packages."""
