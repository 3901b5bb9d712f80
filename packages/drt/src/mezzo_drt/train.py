"""`python -m mezzo_drt.train RECIPE`: what `torchrun` starts in each process."""

import sys

from mezzo_drt.__main__ import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
