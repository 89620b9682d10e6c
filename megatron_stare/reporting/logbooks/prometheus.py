"""The newest line for Prometheus: `http://<host>:<port>/metrics`."""

from __future__ import annotations

import re
from typing import Any

from megatron_stare.config import UserError
from megatron_stare.reporting.logbooks.mirror import Row, missing, numbers

PREFIX = "megatron_stare_"


class Prometheus:
    """A gauge for each number, with the run's name as its label; what a step has no value of is
    absent. Letters that Prometheus does not know become `_`.
    """

    name = "prometheus"

    def __init__(self, run: str, host: str, port: int) -> None:
        self.run, self.host, self.port = run, host, port
        self._newest: dict[str, float] = {}

    def open(self, last_step: int | None) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            option = f"run.prometheus_port={self.port}"
            raise missing(option, "prometheus-client") from None
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

    def write(self, row: Row) -> None:
        self._newest = numbers(row) | {"step": float(row["step"])}

    def collect(self) -> Any:
        """What the client asks for at every request."""
        from prometheus_client.core import GaugeMetricFamily

        for key, value in self._newest.items():
            name = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            gauge = GaugeMetricFamily(name, f"{key} of the newest step", labels=["run"])
            gauge.add_metric([self.run], value)
            yield gauge

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
