"""Behind `mezzo-rat reproduce`: exact checks, tiny trainings, timings, and what each answers."""
