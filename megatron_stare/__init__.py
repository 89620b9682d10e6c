"""megatron_stare: reinforcement learning with verifiable rewards on Megatron-Core,
without entropy collapse.
"""

__version__ = "0.2.0"
