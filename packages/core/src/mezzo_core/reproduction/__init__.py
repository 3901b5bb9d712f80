"""What every paper's `reproduce` command does: tiny trainings, committed results, one report.

A package has its own tables, claims and checks, and calls the parts that it needs:

| File | Has |
|---|---|
| `flow` | from the command to the report: ids, threads, progress, what breaks, what is printed |
| `training` | recipes trained at a small budget, several seeds, one model a core |
| `evidence` | work done once, when the first table asks; what the trainings say |
| `orders` | a claim's order against our numbers, and against results measured elsewhere |
| `checks` | equalities of the method; a paper's settings against our recipes |
| `figures` | curves, bars and a sample text from the trainings |
"""
