"""The Recurrent Transformer: each layer attends to keys and values of its own outputs."""

__version__ = "0.1.0"
