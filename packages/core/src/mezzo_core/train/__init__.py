"""Training: one readable loop, checkpoints that survive a kill, one process or many."""
