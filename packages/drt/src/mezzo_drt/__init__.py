"""DRT: learned retrieval of past chunks inside attention."""

__version__ = "0.1.0"
