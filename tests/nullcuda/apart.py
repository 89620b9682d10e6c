"""Functions in a process of their own: on the device without TransformerEngine, or on the CPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.distributed import fork_server
from tests.paths import ROOT

OF_DEVICE = (f"{ROOT}/.nullcuda", f"{ROOT}/tools/nullcuda")


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) on the device without TransformerEngine. RuntimeError if it raises; its
    traceback is on stderr.
    """
    receiving, sending = fork_server().Pipe(duplex=False)
    process = fork_server().Process(target=_answer, args=(sending, function, args))
    process.start()
    sending.close()
    try:
        return pickle.loads(receiving.recv_bytes())
    except EOFError:
        raise RuntimeError(f"{function.__name__} failed in a process of its own") from None
    finally:
        process.join()


def _answer(sending: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    sending.send_bytes(pickle.dumps(function(*args)))  # tensors whole, not as shared memory


def on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a process that tools/nullcuda/run did not start. Arguments and result
    are pickled. CalledProcessError if the function raises; its traceback is on stderr.
    """
    environment = os.environ | {
        name: ":".join(
            part for part in os.environ[name].split(":") if not part.startswith(OF_DEVICE)
        )
        for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
    }
    del environment["NULLCUDA_LIBRARY"]
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((function, args)),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        check=True,
    )
    return pickle.loads(done.stdout)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # printed text is not part of the result
        asked, given = pickle.load(sys.stdin.buffer)
        pickle.dump(asked(*given), answer)
