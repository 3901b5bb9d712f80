"""GSA: gated slot attention and its family; Transformers fine-tuned into RNNs."""

from typing import TYPE_CHECKING

from mezzo_core.lazy import lazy_names

if TYPE_CHECKING:
    from mezzo_gsa.abc import ABC as ABC
    from mezzo_gsa.abc import ABCConfig as ABCConfig
    from mezzo_gsa.fla.accelerate import accelerate_fla as accelerate_fla
    from mezzo_gsa.gated_abc import GatedABC as GatedABC
    from mezzo_gsa.gated_abc import GatedABCConfig as GatedABCConfig
    from mezzo_gsa.gla import GLA as GLA
    from mezzo_gsa.gla import GLAConfig as GLAConfig
    from mezzo_gsa.gsa import GSA as GSA
    from mezzo_gsa.gsa import GSAConfig as GSAConfig
    from mezzo_gsa.gsa import head_width as head_width
    from mezzo_gsa.hgrn2 import HGRN2 as HGRN2
    from mezzo_gsa.hgrn2 import HGRN2Config as HGRN2Config
    from mezzo_gsa.hgrn2_stack import HGRN2Stack as HGRN2Stack
    from mezzo_gsa.hgrn2_stack import HGRN2StackConfig as HGRN2StackConfig
    from mezzo_gsa.mamba import Mamba as Mamba
    from mezzo_gsa.mamba import MambaConfig as MambaConfig
    from mezzo_gsa.retnet import RetNet as RetNet
    from mezzo_gsa.retnet import RetNetConfig as RetNetConfig
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "abc": ("ABC", "ABCConfig"),
            "fla.accelerate": ("accelerate_fla",),
            "gated_abc": ("GatedABC", "GatedABCConfig"),
            "gla": ("GLA", "GLAConfig"),
            "gsa": ("GSA", "GSAConfig", "head_width"),
            "hgrn2": ("HGRN2", "HGRN2Config"),
            "hgrn2_stack": ("HGRN2Stack", "HGRN2StackConfig"),
            "mamba": ("Mamba", "MambaConfig"),
            "retnet": ("RetNet", "RetNetConfig"),
        },
    )

__version__ = "0.1.0"
