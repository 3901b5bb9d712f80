"""From a paper's printed numbers to a report of what we measured about them.

| File | Content |
|---|---|
| `published` | the tables and claims as printed, and what those need that have no evidence |
| `measurement` | our numbers, of result files or of this run |
| `criteria`, `outcomes` | what a measurement must show for a claim to agree, and what comes out |
| `claims` | what answers each table and claim: `Answer`, `Evidence`, `Finding` |
| `trainings`, `beside` | tiny trainings; our values beside printed ones |
| `reproduction` | `Reproduction`: all that the `reproduce` command is |
| `report`, `tables`, `figures` | report.html and report.json |
| `markdown` | RESULTS.md, and the numbers of READMEs |
"""
