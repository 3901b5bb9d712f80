"""`--scale gpu`: the paper's speed tables, measured at the paper's sizes on one GPU."""
