"""Copies of metrics.jsonl in TensorBoard, Weights & Biases, MLflow and Prometheus.

`trackers_of` makes those that run.logbooks and run.prometheus_port name; logbook.py writes to them.
Their packages are imported when a tracker is opened.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from megatron_stare.config import RunConfig, UserError
from megatron_stare.system import atomic_write

Row = Mapping[str, float | int | str | bool]
PROGRESS_NAME = "trackers.json"
MOST_METRICS = 1000  # in one request to MLflow
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
PREFIX = "megatron_stare_"  # of a metric's name in Prometheus


class Tracker(Protocol):
    """A copy of metrics.jsonl. An exception other than UserError ends the copy, not the run."""

    name: str

    def open(self, last_step: int | None) -> None:
        """Start after step `last_step` of metrics.jsonl. UserError: a package is missing."""
        ...

    def write(self, row: Row) -> None:
        """Copy one line, whose numbers are finite."""
        ...

    def close(self) -> None:
        """Send what is still buffered."""
        ...


def trackers_of(run: RunConfig) -> list[Tracker]:
    """The trackers of a run in the order of run.logbooks; they are not open yet."""
    directory = Path(run.dir)
    found: list[Tracker] = []
    for name in dict.fromkeys(run.logbooks):
        if name == "tensorboard":
            found.append(TensorBoard(directory))
        elif name == "wandb":
            found.append(WeightsAndBiases(directory, run.project))
        elif name == "mlflow":
            found.append(MLflow(directory, run.project))
    if run.prometheus_port:
        found.append(Prometheus(directory.name, run.prometheus_host, run.prometheus_port))
    return found


class TensorBoard:
    """Event files in `<run.dir>/tensorboard`. A resumed run purges the steps it repeats."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "tensorboard"
        self._writer: Any = None

    def open(self, last_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("run.logbooks=[tensorboard]", "tensorboard") from None
        self._writer = SummaryWriter(str(self.directory), purge_step=(last_step or 0) + 1)

    def write(self, row: Row) -> None:
        for key, value in _numbers(row).items():
            self._writer.add_scalar(key, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class SentSteps:
    """The steps sent to a service that cannot delete any: its id of the run, and the last step.

    `<run.dir>/trackers.json`. A step is recorded before it is sent, so that a kill between the two
    loses the step instead of sending it twice. Steps that a resumed run repeats, after `last_step`,
    are not sent a second time.
    """

    def __init__(self, directory: Path, name: str, last_step: int | None) -> None:
        self._path = Path(directory) / PROGRESS_NAME
        self._name = name
        found = self._read().get(name, {})
        self.id: str = found.get("id", "")
        self.step: int = found.get("step", -1)
        first = (last_step or 0) + 1
        if first <= self.step:
            print(
                f"{name} keeps the lines that it has of steps {first} to {self.step}, which are "
                f"repeated; remove {self._path} before a start that is to send them to a new run",
                file=sys.stderr,
                flush=True,
            )

    def set_id(self, id: str) -> None:
        """Record the service's id of this run."""
        self.id = id
        self._write()

    def start_step(self, step: int) -> bool:
        """Record a step that is about to be sent; False if it was sent before."""
        if step <= self.step:
            return False
        self.step = step
        self._write()
        return True

    def _write(self) -> None:
        everything = self._read() | {self._name: {"id": self.id, "step": self.step}}
        atomic_write(self._path, json.dumps(everything))

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            return dict(json.loads(self._path.read_text())) if self._path.is_file() else {}
        except ValueError:
            raise UserError(f"{self._path}: not valid JSON; remove it") from None


class WeightsAndBiases:
    """One wandb run per run directory, resumed by its id.

    WANDB_MODE=offline writes only to `<run.dir>/wandb`, for a later `wandb sync`.
    """

    name = "wandb"

    def __init__(self, directory: Path, project: str) -> None:
        self.directory = directory
        self.project = project
        self._run: Any = None

    def open(self, last_step: int | None) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("run.logbooks=[wandb]", "wandb") from None
        self._sent = SentSteps(self.directory, self.name, last_step)
        if not self._sent.id:
            self._sent.set_id(uuid.uuid4().hex)
        settings = self.directory / "config.yaml"
        self._run = wandb.init(
            project=self.project,
            name=self.directory.name,
            id=self._sent.id,
            resume="allow",
            dir=str(self.directory),
            config=yaml.safe_load(settings.read_text()) if settings.is_file() else None,
        )

    def write(self, row: Row) -> None:
        step = int(row["step"])
        if self._sent.start_step(step):
            self._run.log(_numbers(row), step=step, commit=True)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """One MLflow run per run directory, resumed by its id.

    Without MLFLOW_TRACKING_URI it writes to `<run.dir>/mlflow.db` and needs no server.
    """

    name = "mlflow"

    def __init__(self, directory: Path, project: str) -> None:
        self.directory = directory
        self.project = project
        self._client: Any = None

    def open(self, last_step: int | None) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise _missing("run.logbooks=[mlflow]", "mlflow") from None
        own = f"sqlite:///{(self.directory / 'mlflow.db').absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or own)
        self._sent = SentSteps(self.directory, self.name, last_step)
        if not self._sent.id:
            found = self._client.get_experiment_by_name(self.project)
            experiment = found.experiment_id if found else None
            run = self._client.create_run(
                experiment or self._client.create_experiment(self.project),
                run_name=self.directory.name,
            )
            self._sent.set_id(run.info.run_id)
        self._client.update_run(self._sent.id, status="RUNNING")

    def write(self, row: Row) -> None:
        from mlflow.entities import Metric

        step = int(row["step"])
        if not self._sent.start_step(step):
            return
        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in _numbers(row).items()]
        for start in range(0, len(metrics), MOST_METRICS):
            part = metrics[start : start + MOST_METRICS]
            self._client.log_batch(self._sent.id, metrics=part)

    def close(self) -> None:
        self._client.set_terminated(self._sent.id)


class Prometheus:
    """The newest line at `http://<host>:<port>/metrics`: a gauge per number, labelled by the run.

    A number that the step does not have is absent. Characters that Prometheus does not allow in a
    name become `_`; the label `metric` is the name in metrics.jsonl. On a loopback address only
    requests for such an address are answered, so that no page of a browser can read the numbers
    under a name of its own.
    """

    name = "prometheus"

    def __init__(self, run: str, host: str, port: int) -> None:
        self.run = run
        self.host = host
        self.port = port
        self._newest: dict[str, float] = {}

    def open(self, last_step: int | None) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            option = f"run.prometheus_port={self.port}"
            raise _missing(option, "prometheus-client") from None
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(
                self.port, addr=self.host, registry=registry
            )
        except OSError as error:
            raise UserError(
                f"run.prometheus_port={self.port} on {self.host}: {error.strerror or error}; "
                "choose another port or run.prometheus_host"
            ) from None
        if self.host in LOOPBACK:
            self._server.set_app(_for_loopback(self._server.get_app()))

    def write(self, row: Row) -> None:
        self._newest = _numbers(row) | {"step": float(row["step"])}

    def collect(self) -> Any:
        """The gauges; the client calls this on every request."""
        from prometheus_client.core import GaugeMetricFamily

        gauges: dict[str, Any] = {}
        for key, value in self._newest.items():
            name = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            if name not in gauges:
                help_text = f"{key} of the newest step"
                gauges[name] = GaugeMetricFamily(name, help_text, labels=["run", "metric"])
            gauges[name].add_metric([self.run, key], value)
        yield from gauges.values()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _for_loopback(app: Any) -> Any:
    """The WSGI application, but for requests whose Host is not a loopback address: 421."""

    def answer(environ: dict[str, Any], start: Any) -> Any:
        host = re.sub(r":\d+$", "", environ.get("HTTP_HOST", "")).strip("[]")
        if host in LOOPBACK:
            return app(environ, start)
        start("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [b"the Host of the request is not a loopback address\n"]

    return answer


def _numbers(row: Row) -> dict[str, float]:
    """The row's numbers without its step."""
    return {k: float(v) for k, v in row.items() if k != "step" and not isinstance(v, str)}


def _missing(option: str, package: str) -> UserError:
    return UserError(f"{option} needs {package}; pip install 'megatron-stare[tracking]'")
