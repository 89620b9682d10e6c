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
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor

_THREADS = 1024
# Stopped functions without async whose threads still run, after which the host ends: nothing else
# ends a thread, and when all are taken no further episode can start.
_MOST_STUCK = 256
_END_SECONDS = 5.0
# The trainer reads these fields of an outcome; an agent may return more, such as a trace.
_FIELDS = ("reward", "metrics", "truncated", "failed", "message")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_threads: set[int] = set()  # that run functions without async


def load(path):
    """The function of a dotted path."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError(f"{path!r} is not a dotted path; write package.module.function")
    sys.path[0] = os.getcwd()
    # The adapters, by their own place: the trainer's packages next to them are no agent's.
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        "megatron_stare_agents",
        os.path.join(folder, "__init__.py"),
        submodule_search_locations=[folder],
    )
    sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
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
        found = await asyncio.to_thread(_in_thread, function, row, endpoint)
        if inspect.isawaitable(found):  # of an object, or of a function under a decorator
            found = await found
    return found if isinstance(found, dict) else {"reward": found}


def _in_thread(function, row, endpoint):
    own = threading.get_ident()
    _threads.add(own)
    try:
        return function(row, endpoint)
    finally:
        _threads.discard(own)


async def run_command(command, message, grace_seconds):
    """The outcome of a command's episode."""
    patience = 0.0
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
        process = await asyncio.create_subprocess_exec(
            *(filled(part, endpoint) for part in command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            env=os.environ | names,
            start_new_session=True,
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:  # stopped: it may end containers, for example
            patience = 0.8 * grace_seconds  # after which the trainer ends this host
            raise
        finally:
            await end_session(process.pid, patience)
        with contextlib.suppress(OSError), open(outcome, encoding="utf-8") as file:
            if text := file.read().strip():
                found = json.loads(text.rpartition("\n")[2])
                return found if isinstance(found, dict) else {"reward": found}
        if code:
            return {"failed": "exit_code", "message": f"the command ended with exit code {code}"}
        return {"reward": None}


def filled(part, endpoint):
    """An argument with the endpoint's values; other braces, as of JSON or awk, stay."""
    for name, value in endpoint.items():
        part = part.replace(f"{{{name}}}", str(value))
    return part


def processes():
    """Number, state, parent and session of every process of this machine."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent, _, session = file.read().rpartition(")")[2].split()[:4]
            yield int(name), state, int(parent), int(session)


def _kill(found, number=signal.SIGKILL):
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


async def end_session(session, patience):
    """End what a command has started, also what left its process group, as `timeout` does. With
    `patience` it first gets SIGTERM, and these seconds to end.
    """
    if patience:
        _kill(_of_session(session), signal.SIGTERM)
    kills = time.monotonic() + patience
    while (now := time.monotonic()) < kills + _END_SECONDS and (found := _of_session(session)):
        if now >= kills:
            _kill(found)
        await asyncio.sleep(0.01 if now >= kills else 0.1)


def _of_session(session):
    return [number for number, state, _, its in processes() if its == session and state != "Z"]


def end_descendants():
    """End what agents and environments have started, tool servers for example, until none is left.
    What has lost its parent is found too: it is a child of this process then.
    """
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        children = {}
        for number, _, parent, _ in processes():
            children.setdefault(parent, []).append(number)
        below = [os.getpid()]
        for process in below:
            below += children.get(process, ())
        _kill(below[1:])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def supervise():
    """Continue in a child. This process waits for it, ends everything that it leaves, and then ends
    as it did, also where the child was killed, as by the kernel when memory runs out.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if not child:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        return
    signal.signal(signal.SIGTERM, lambda *_: _kill([child]))
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)  # the child alone has the trainer's lines
    ended = 0
    while ended != child:
        ended, status = os.wait()
    end_descendants()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no other action
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


class Host:
    """The episodes of this process."""

    def __init__(self, settings, write):
        self.settings, self.write = settings, write
        command = settings["command"]
        self.function = None if command else load(settings["function"])
        if command and shutil.which(command[0]) is None:
            raise FileNotFoundError(f"there is no program {command[0]!r} on PATH; name its file")
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
                command, seconds = self.settings["command"], self.settings["grace_seconds"]
                outcome = await run_command(command, message, seconds)
            else:
                outcome = await run_function(self.function, message)
            outcome = {name: outcome[name] for name in _FIELDS if name in outcome}
            json.dumps(outcome)
        except asyncio.CancelledError:
            outcome = {"failed": "stopped", "message": "the trainer stopped it"}
        except BaseException as error:
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            outcome = {"failed": type(error).__name__, "message": text[:2000]}
        self.tasks.pop(number, None)
        self.write({"done": number, "outcome": outcome})
        if len(_threads) - len(self.tasks) >= _MOST_STUCK:
            print(f"{_MOST_STUCK} stopped agents still run; their host ends", file=sys.stderr)
            os._exit(1)


def main():
    """Serve until stdin ends."""
    supervise()
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
        os._exit(0)  # the trainer is gone, and so is the use of what still runs

    threading.Thread(target=read, daemon=True).start()
    write({"ready": ""})
    loop.run_forever()


if __name__ == "__main__":
    main()
