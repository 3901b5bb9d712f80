"""`mezzo-rat reproduce`: exact checks, tiny trainings, timings, and the claims they answer."""
