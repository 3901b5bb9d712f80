"""Models of mezzo in the Hugging Face libraries (extra `hub`).

`import mezzo_core.hub` registers them: afterwards `AutoConfig`, `AutoModelForCausalLM` and
`pipeline` read the folders that `export_model` writes.
"""

from mezzo_core.hub.cache import MezzoCache as MezzoCache
from mezzo_core.hub.config import MezzoConfig as MezzoConfig
from mezzo_core.hub.model import MezzoForCausalLM as MezzoForCausalLM
from mezzo_core.hub.register import register_model

register_model(MezzoConfig, MezzoForCausalLM)
