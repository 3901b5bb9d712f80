"""Parts of language models: the mixer contract, blocks, the model, generation, saving."""

from mezzo_core.nn.attention import Attention as Attention
from mezzo_core.nn.attention import AttentionConfig as AttentionConfig
from mezzo_core.nn.block import Block as Block
from mezzo_core.nn.checkpoint import load_model as load_model
from mezzo_core.nn.checkpoint import save_model as save_model
from mezzo_core.nn.generate import Decoder as Decoder
from mezzo_core.nn.generate import Sampler as Sampler
from mezzo_core.nn.generate import generate as generate
from mezzo_core.nn.generate import stream as stream
from mezzo_core.nn.init import init_weights as init_weights
from mezzo_core.nn.lm import LM as LM
from mezzo_core.nn.lm import LMConfig as LMConfig
from mezzo_core.nn.lm import LMOutput as LMOutput
from mezzo_core.nn.mixer import AbstractMixer as AbstractMixer
from mezzo_core.nn.mixer import MixerConfig as MixerConfig
from mezzo_core.nn.mlp import MLPConfig as MLPConfig
