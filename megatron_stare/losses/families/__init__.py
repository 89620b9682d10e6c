"""The objectives of the field, one file per family; importing them registers them."""

from megatron_stare.losses.families import (  # noqa: F401
    clipping,
    control,
    distributions,
    divergence,
    masking,
    ranked,
    sequences,
    sft,
    weighting,
)
