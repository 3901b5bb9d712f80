"""Transformers turned into RNNs (T2R): read a checkpoint, convert it, fine-tune it."""

from mezzo_core.nn.llama import load_llama as load_llama

from mezzo_gsa.convert.convert import TARGETS as TARGETS
from mezzo_gsa.convert.convert import convert as convert
from mezzo_gsa.convert.convert import convert_config as convert_config
