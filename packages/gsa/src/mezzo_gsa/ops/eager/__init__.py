"""Loops of eager PyTorch: as ops of compiled graphs, and without autocast."""
