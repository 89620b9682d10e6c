"""MLflow. Without MLFLOW_TRACKING_URI it writes to `<run.dir>/mlflow.db`, and to no server."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from megatron_stare.reporting.logbooks.mirror import Row, Sent, missing, numbers

MOST_AT_ONCE = 1000  # metrics of one request


class MLflow:
    """One run there for one run directory, however often it is continued: its id is kept."""

    name = "mlflow"

    def __init__(self, directory: Path, project: str) -> None:
        self.directory, self.project = directory, project
        self._client: Any = None

    def open(self, last_step: int | None) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise missing("run.logbooks=[mlflow]", "mlflow") from None
        own = f"sqlite:///{(self.directory / 'mlflow.db').absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or own)
        self._sent = Sent(self.directory, self.name)
        if not self._sent.id:
            found = self._client.get_experiment_by_name(self.project)
            experiment = found.experiment_id if found else None
            run = self._client.create_run(
                experiment or self._client.create_experiment(self.project),
                run_name=self.directory.name,
            )
            self._sent.note(id=run.info.run_id)
        self._client.update_run(self._sent.id, status="RUNNING")

    def write(self, row: Row) -> None:
        from mlflow.entities import Metric

        step, now = int(row["step"]), int(time.time() * 1000)
        if not self._sent.begin(step):
            return
        metrics = [Metric(key, value, now, step) for key, value in numbers(row).items()]
        for start in range(0, len(metrics), MOST_AT_ONCE):
            part = metrics[start : start + MOST_AT_ONCE]
            self._client.log_batch(self._sent.id, metrics=part)

    def close(self) -> None:
        self._client.set_terminated(self._sent.id)
