"""The places that a run's configuration names."""

from __future__ import annotations

from pathlib import Path

from megatron_stare.config import RunConfig
from megatron_stare.reporting.logbooks.mirror import Mirror
from megatron_stare.reporting.logbooks.mlflow_runs import MLflow
from megatron_stare.reporting.logbooks.prometheus import Prometheus
from megatron_stare.reporting.logbooks.tensor_board import TensorBoard
from megatron_stare.reporting.logbooks.weights_and_biases import WeightsAndBiases


def mirrors_of(run: RunConfig) -> list[Mirror]:
    """In the order of run.logbooks; none is open yet."""
    directory, found = Path(run.dir), list[Mirror]()
    for name in dict.fromkeys([*run.logbooks, *(["tensorboard"] if run.tensorboard else [])]):
        if name == "tensorboard":
            found.append(TensorBoard(directory))
        elif name == "wandb":
            found.append(WeightsAndBiases(directory, run.project))
        elif name == "mlflow":
            found.append(MLflow(directory, run.project))
    if run.prometheus_port:
        found.append(Prometheus(directory.name, run.prometheus_host, run.prometheus_port))
    return found
