"""Our ops and layers beside those of fla (flash-linear-attention)."""
