"""The parts of every paper's `reproduce` command: tiny trainings, committed results, one report.

A package has its own tables, claims and checks, and calls the parts that it needs:

| File | Content |
|---|---|
| `flow` | the steps from the command to the report: ids, threads, progress, failures, printing |
| `training` | trainings of recipes with a small budget and several seeds, one model per core |
| `evidence` | measurements that are made once, when the first table needs them |
| `orders` | comparison of a claim's order with our numbers and with committed results |
| `speed` | comparison of speeds in committed results |
| `checks` | equalities of the method; a paper's hyperparameters against our recipes |
| `figures` | curves, bars and a sample text from the trainings |
"""
