"""MAD's six synthetic tasks and copying: one layer against one layer (figure "synth")."""
