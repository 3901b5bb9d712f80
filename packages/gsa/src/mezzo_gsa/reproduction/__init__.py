"""`mezzo-gsa reproduce`: exact checks, tiny trainings, and the claims they answer."""
