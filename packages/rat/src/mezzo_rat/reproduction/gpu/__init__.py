"""Behind `--scale gpu`: the paper's tables of speed, measured at the paper's sizes on one GPU."""
