"""mezzo-core: ops."""
