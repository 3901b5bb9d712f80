"""Evaluation of language models: `mezzo_core.eval.evaluate`."""
