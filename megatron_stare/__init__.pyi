from megatron_stare.api import evaluate as evaluate
from megatron_stare.api import generate as generate
from megatron_stare.api import load_config as load_config
from megatron_stare.api import train as train

__version__: str
