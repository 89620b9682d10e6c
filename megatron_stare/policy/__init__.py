"""The Megatron-Core model that learns:
topology, build, attention, head, HF names and weights, packing, actor.
"""
