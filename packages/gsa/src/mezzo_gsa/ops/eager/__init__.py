"""Loops of eager PyTorch, and what is around them: compiled graphs and autocast."""
