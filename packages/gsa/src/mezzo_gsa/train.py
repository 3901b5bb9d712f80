"""`python -m mezzo_gsa.train RECIPE`: the program that `torchrun` starts in each process."""

import sys

from mezzo_gsa.__main__ import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
