"""Parts of language models: the contract, mixers, blocks, stacks, generation, saving."""

from mezzo_core.nn.attention import Attention as Attention
from mezzo_core.nn.attention import AttentionConfig as AttentionConfig
from mezzo_core.nn.block import Block as Block
from mezzo_core.nn.block import MixerBlockConfig as MixerBlockConfig
from mezzo_core.nn.checkpoint import load_model as load_model
from mezzo_core.nn.checkpoint import save_model as save_model
from mezzo_core.nn.contract import AbstractBlock as AbstractBlock
from mezzo_core.nn.contract import AbstractMixer as AbstractMixer
from mezzo_core.nn.contract import AbstractStack as AbstractStack
from mezzo_core.nn.contract import BlockConfig as BlockConfig
from mezzo_core.nn.contract import MixerConfig as MixerConfig
from mezzo_core.nn.contract import StackConfig as StackConfig
from mezzo_core.nn.decoder import Decoder as Decoder
from mezzo_core.nn.generate import generate as generate
from mezzo_core.nn.generate import stream as stream
from mezzo_core.nn.init import init_weights as init_weights
from mezzo_core.nn.lm import LM as LM
from mezzo_core.nn.lm import LMConfig as LMConfig
from mezzo_core.nn.lm_output import LMOutput as LMOutput
from mezzo_core.nn.mlp import MLPConfig as MLPConfig
from mezzo_core.nn.rewinding import Rewinding as Rewinding
from mezzo_core.nn.sampler import Sampler as Sampler
from mezzo_core.nn.stack import BlocksConfig as BlocksConfig
from mezzo_core.nn.stack import Stack as Stack
from mezzo_core.nn.state_file import load_state as load_state
from mezzo_core.nn.state_file import save_state as save_state
