"""From a paper's printed numbers to a report of what we measured about them.

| File | Content |
|---|---|
| `published` | the tables and claims as printed |
| `measurement` | our numbers, of result files or of this run |
| `criteria` | what a measurement must show for a claim to agree |
| `claims` | what answers each table and claim: `Answer`, `Evidence`, `Finding` |
| `trainings`, `beside` | tiny trainings; our recipes' values beside printed ones |
| `speeds` | the sizes, result files and script of a paper's speeds |
| `reproduction` | `Reproduction`: all that the `reproduce` command is |
| `report`, `tables`, `markdown`, `html`, `figures` | the report and RESULTS.md |
"""
