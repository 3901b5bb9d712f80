"""`python -m mezzo_recurrent_transformer.train RECIPE`: what `torchrun` starts in each process."""

import sys

from mezzo_recurrent_transformer.__main__ import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
