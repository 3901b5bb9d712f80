"""mezzo-core."""
