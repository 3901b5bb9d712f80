"""Behind `mezzo-gsa reproduce`: exact checks, tiny trainings, and which result answers what."""
