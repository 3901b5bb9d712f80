"""RAT: a gated linear RNN inside chunks, softmax attention across their ends; and its baselines."""

from typing import TYPE_CHECKING

from mezzo_core.lazy import lazy_names

if TYPE_CHECKING:
    from mezzo_rat.linear_rnn import LinearRNN as LinearRNN
    from mezzo_rat.linear_rnn import LinearRNNConfig as LinearRNNConfig
    from mezzo_rat.mixer import RAT as RAT
    from mezzo_rat.mixer import RATConfig as RATConfig
    from mezzo_rat.reversed import RATReversed as RATReversed
    from mezzo_rat.reversed import RATReversedConfig as RATReversedConfig
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "linear_rnn": ("LinearRNN", "LinearRNNConfig"),
            "mixer": ("RAT", "RATConfig"),
            "reversed": ("RATReversed", "RATReversedConfig"),
        },
    )

__version__ = "0.1.0"
