"""A verifier process: reads chunks of samples from a socket and answers each with a verdict.

It imports neither torch nor the configuration. It ends with its parent: by PR_SET_PDEATHSIG on
Linux, by the socket's end elsewhere. RLIMIT_AS limits its memory: a verifier that reaches the limit
ends the process, and the pool starts a new one.
"""

from __future__ import annotations

import functools
import importlib
import os
import resource
import signal
from multiprocessing.connection import Connection
from typing import Any

from megatron_stare.scoring.signatures import Called, adapted
from megatron_stare.scoring.verdict import (
    Verdict,
    announce_with,
    as_verdict,
    printable,
    unverifiable,
)
from megatron_stare.system import end_with_parent

OUT_OF_MEMORY = 77  # exit code
READY, FAILED = "ready", "failed"


def main(descriptor: int, parent: int, memory_mib: int) -> None:
    """Serve until the socket ends. `memory_mib` 0: no limit."""
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mib:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    os.dup2(2, 1)  # what a verifier prints must not look like the run's own output
    connection = Connection(descriptor)
    try:
        specs = connection.recv()
        try:
            verifiers = {name: load(path, settings) for name, (path, settings) in specs.items()}
            for path, _ in specs.values():
                _warm_up(path)
        except Exception as error:  # whatever a user's module does on import
            connection.send((FAILED, f"{type(error).__name__}: {error}"))
            return
        connection.send((READY, ""))
        announce_with(lambda verdict: connection.send((verdict,)))
        while True:
            name, samples = connection.recv()
            for sample in samples:
                connection.send(_judge(verifiers[name], sample))
    except (EOFError, OSError):
        return  # the pool has closed
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def load(path: str, settings: dict[str, Any]) -> Called:
    """The function at a dotted path, its settings bound."""
    module, _, attribute = path.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    return adapted(functools.partial(function, **settings) if settings else function)


def _warm_up(path: str) -> None:
    """Call the module's `warm_up`, if it has one, so that the first sample's deadline does not pay
    for caches and imports.
    """
    getattr(importlib.import_module(path.rpartition(".")[0]), "warm_up", lambda: None)()


def _judge(verifier: Called, sample: tuple[str, str, dict[str, Any], str]) -> Verdict:
    try:
        return as_verdict(verifier(*sample))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except (
        Exception
    ) as error:  # the verifier's own fault: this sample is unverifiable, the next one may be fine
        return unverifiable(printable(f"{type(error).__name__}: {error}"))


def _end_with(parent: int) -> None:
    end_with_parent()
    if os.getppid() != parent:  # it died before this line
        os._exit(1)
