"""A host: runs agents' episodes for the trainer, which writes and reads one JSON object a line.

A process of the agent's own Python executes this file, which therefore imports the standard library
alone. stdin and stdout carry the lines; what an agent prints goes to stderr.

    in   {"start": n, "row": {...}, "endpoint": {...}, "attempt": k}     {"stop": n}
    out  {"ready": ""}     {"done": n, "outcome": {"reward": 1.0, "metrics": {...}}}

A function `async def run(row, endpoint)` (or without async, then in a thread) returns a number, a
dict with `reward`, `metrics` and `truncated`, or None; an error that it raises is an outcome with
`failed`.
row.prompt, row.messages, row.label, row.metadata and row.index are the problem; endpoint.base_url,
endpoint.api_key and endpoint.model are the policy.

A command gets them as {base_url}, {api_key}, {model} in its arguments, and in its environment as
OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY; MEGATRON_STARE_ROW names a
JSON file with the row, and the last line of the file MEGATRON_STARE_OUTCOME is the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import types
from concurrent.futures import ThreadPoolExecutor

_THREADS = 1024
_commands: set[int] = set()  # process groups


def load(path):
    """The function of a dotted path."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError(f"{path!r} is not a dotted path; write package.module.function")
    sys.path[0] = os.getcwd()
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the adapters
    found = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise TypeError(f"{path} is not a function")
    return found


async def run_function(function, message):
    """The outcome of a function's episode."""
    row = types.SimpleNamespace(**message["row"])
    endpoint = types.SimpleNamespace(**message["endpoint"], attempt=message["attempt"])
    if inspect.iscoroutinefunction(function):
        found = await function(row, endpoint)
    else:
        found = await asyncio.to_thread(function, row, endpoint)
    return found if isinstance(found, dict) else {"reward": found}


async def run_command(command, message):
    """The outcome of a command's episode."""
    endpoint = message["endpoint"]
    base = endpoint["base_url"]
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        row, outcome = os.path.join(folder, "row.json"), os.path.join(folder, "outcome.jsonl")
        with open(row, "w", encoding="utf-8") as file:
            json.dump(message["row"], file)
        names = {
            "OPENAI_BASE_URL": base,
            "OPENAI_API_KEY": endpoint["api_key"],
            "ANTHROPIC_BASE_URL": base.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": endpoint["api_key"],
            "MEGATRON_STARE_ROW": row,
            "MEGATRON_STARE_OUTCOME": outcome,
        }
        filled = [part.format(**endpoint) for part in command]
        process = await asyncio.create_subprocess_exec(
            *filled,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            env=os.environ | names,
            start_new_session=True,
        )
        _commands.add(process.pid)
        try:
            code = await process.wait()
        finally:
            _end_group(process.pid)
            _commands.discard(process.pid)
        with contextlib.suppress(OSError, IndexError):
            with open(outcome, encoding="utf-8") as file:
                found = json.loads(file.read().splitlines()[-1])
            return found if isinstance(found, dict) else {"reward": found}
        if code:
            return {"failed": "exit_code", "message": f"the command ended with exit code {code}"}
        return {"reward": None}


def _end_group(group):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def end_descendants():
    """End what agents and environments have started, tool servers for example."""
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    below = [os.getpid()]
    for process in below:
        below += children.get(process, ())
    for process in below[1:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


class Host:
    """The episodes of this process."""

    def __init__(self, settings, write):
        self.settings, self.write = settings, write
        self.function = None if settings["command"] else load(settings["function"])
        self.tasks = {}

    async def receive(self, message):
        """Start or stop an episode."""
        if "stop" in message:
            task = self.tasks.get(message["stop"])
            if task is not None:
                task.cancel()
            return
        number = message["start"]
        self.tasks[number] = asyncio.create_task(self._episode(number, message))

    async def _episode(self, number, message):
        try:
            if self.function is None:
                outcome = await run_command(self.settings["command"], message)
            else:
                outcome = await run_function(self.function, message)
            json.dumps(outcome)
        except asyncio.CancelledError:
            outcome = {"failed": "stopped", "message": "the trainer stopped it"}
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            outcome = {"failed": type(error).__name__, "message": text[:2000]}
        self.tasks.pop(number, None)
        self.write({"done": number, "outcome": outcome})


def main():
    """Serve until stdin ends."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what an agent prints must not reach the trainer's lines
    lock = threading.Lock()

    def write(message):
        # Where the trainer is gone, the end of stdin ends this process.
        with lock, contextlib.suppress(BrokenPipeError):
            lines.write(json.dumps(message) + "\n")
            lines.flush()

    try:
        host = Host(json.loads(sys.argv[1]), write)
    except BaseException as error:
        write({"ready": f"{type(error).__name__}: {error}"})
        return
    loop = asyncio.new_event_loop()
    # of functions without async; asyncio's own few would let the others wait
    loop.set_default_executor(ThreadPoolExecutor(_THREADS))

    def read():
        for line in sys.stdin:
            asyncio.run_coroutine_threadsafe(host.receive(json.loads(line)), loop)
        for group in list(_commands):
            _end_group(group)
        end_descendants()
        os._exit(0)  # the trainer is gone, and so is the use of what still runs

    threading.Thread(target=read, daemon=True).start()
    write({"ready": ""})
    loop.run_forever()


if __name__ == "__main__":
    main()
