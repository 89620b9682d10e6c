"""Results of runs on the CPU, which the runs on the device are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.loop.test_trainer_layouts import DELTA, EXPERTS, LATENT, write_models
from tests.nullcuda.apart import on_cpu
from tests.nullcuda.runs import (
    ADAPTERS,
    LATENT_ADAPTERS,
    SHARED_ADAPTERS,
    trained,
    updated_in_bf16,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the models and problems that all these runs use."""
    return str(write_models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="session")
def expected(models: str) -> dict[str, Any]:
    """Two steps of one rank on the CPU: "dense", "experts", "latent", "delta nets"; "adapters",
    "experts adapters", "shared adapters", "latent adapters"; updates "in bf16".
    """
    return on_cpu(references, models)


def references(directory: str) -> dict[str, Any]:
    layouts = {"dense": ("padded",), **{kind: (kind,) for kind in (EXPERTS, LATENT, DELTA)}}
    layouts |= {"adapters": ("padded", ADAPTERS), "latent adapters": (LATENT, *LATENT_ADAPTERS)}
    layouts |= {
        "experts adapters": (EXPERTS, ADAPTERS),
        "shared adapters": (EXPERTS, *SHARED_ADAPTERS),
    }
    runs = trained(directory, layouts)
    return runs | {"in bf16": updated_in_bf16(directory)}
