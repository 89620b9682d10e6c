"""The process that executes code: locks itself in, then answers each request, one per line.

Everything in this process belongs to the code that it runs, this file's own variables included. So
none of its answers is trusted: the guard (guard.py) decides how a call ended, and takes only
`value`, and whether the code ended cleanly or by an exception, from here. Standard library only.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import io
import json
import linecache
import math
import os
import signal
import sys
import threading
import traceback
import types
from typing import Any

from megatron_stare.rollout.sandbox import kernel

LONGEST_LINE = 1000  # characters of a traceback's line


def run(
    settings: dict[str, Any], request_fd: int, report_fd: int, path_fds: dict[str, int]
) -> None:
    """Never returns. `settings` is the guard's; `path_fds` are the open directories of sys.path."""
    try:
        held = lock_in(settings)
        _repair_imports(path_fds)
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron_stare"]:
            del sys.modules[name]
        sys.path[:] = [place for place in sys.path if place != settings["source"]]
        sys.argv = ["main.py"]
        send(report_fd, {"held": sorted(held)})
        _serve(request_fd, report_fd, settings)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def lock_in(settings: dict[str, Any]) -> set[str]:
    """Apply every protection that the kernel grants; the names of those that hold."""
    held = set()
    version = min(settings["landlock"], kernel.landlock_version())
    files = kernel.file_rules(
        [*settings["readable"], "/proc/self"], [settings["directory"], "/dev/null"], version
    )
    if settings["user_id"]:
        kernel.become(settings["user_id"])
        held.add("user")
    kernel.drop_capabilities()
    kernel.set_readable(True)
    kernel.die_with_parent()
    os.chdir(settings["directory"])
    os.umask(0o077)
    held |= kernel.enforce(files, version)
    kernel.set_limits(settings["limits"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the guard ignores it
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return held | _filter_calls(settings, held, version)


def _filter_calls(settings: dict[str, Any], held: set[str], version: int) -> set[str]:
    """Refuse system calls, also those by which code of the trainer's own user could reach that
    user's processes and files, if nothing better stops it. The names of the protections that hold.
    """
    alone = settings["confined"] or settings["user_id"] not in (0, kernel.NOBODY)
    own_view = alone or "mounts" in settings["held"]
    signals = alone or bool({"processes", "signals"} & {*settings["held"], *held})
    rules = kernel.call_rules(
        own_process=0 if signals else os.getpid(),
        attributes=not own_view,
        truncation=not own_view and version < 3,
        group=settings["keep_group"],
    )
    if kernel.filter_calls(rules):
        return {"calls", "signals", "attributes"}
    return {"attributes"} if own_view else set()


def _repair_imports(path_fds: dict[str, int]) -> None:
    """Point sys.path, and packages loaded already,
    through open directories where their paths cannot be walked now.

    An interpreter in a home directory is out of reach for another user; /proc/self/fd/N still leads
    there.
    """
    moved = {
        place: f"/proc/self/fd/{fd}" for place, fd in path_fds.items() if not os.path.isdir(place)
    }
    if not moved:
        return
    sys.path[:] = [moved.get(place, place) for place in sys.path]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        places = getattr(module, "__path__", None)
        if isinstance(places, list):
            for index, place in enumerate(places):
                for old, new in moved.items():
                    if place.startswith(old + os.sep):
                        places[index] = new + place[len(old) :]


def _serve(request_fd: int, report_fd: int, settings: dict[str, Any]) -> None:
    namespace = _fresh_namespace()
    output_bytes = settings["output_bytes"]
    for number, line in enumerate(os.fdopen(request_fd, "rb")):
        request = json.loads(line)
        if not request["keep"]:  # a session has many calls; the guard counts for each of them
            kernel.set_limits({"CPU": math.ceil(settings["cpu_seconds"])})
        _connect_streams(request["stdin"])
        name = f"<code {number + 1}>" if request["keep"] else "<code>"
        reason, value = execute(request["code"], namespace, name)
        if not request["keep"]:
            _finish()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            try:
                stream.flush()  # type: ignore[union-attr]
            except Exception:
                reason = "error"
        send(
            report_fd,
            {"reason": reason, "value": None if value is None else value[: output_bytes + 1]},
        )


def execute(code: str, namespace: dict[str, Any], name: str) -> tuple[str, str | None]:
    """Run the code; (ok, error or memory;
    repr of a last expression that is not None). Tracebacks go to stderr.
    """
    try:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if not isinstance(last, ast.Expr):
            return "ok", None
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        return "ok", None if value is None else repr(value)
    except SystemExit as stop:
        if stop.code is None or stop.code == 0:
            return "ok", None
        print(
            f"exit status {stop.code}" if isinstance(stop.code, int) else stop.code, file=sys.stderr
        )
        return "error", None
    except MemoryError:
        print("MemoryError", file=sys.stderr)
        return "memory", None
    except BaseException as error:
        _print_error(error, name)
        return "error", None


def _print_error(error: BaseException, name: str) -> None:
    """The traceback from the first frame of the code on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    try:
        lines = traceback.format_exception(type(error), error, trace, limit=-20)
        for line in "".join(lines).splitlines():
            print(
                line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}...", file=sys.stderr
            )
    except BaseException:
        os.write(2, type(error).__name__.encode() + b"\n")


def _fresh_namespace() -> dict[str, Any]:
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath("main.py")  # which is not written
    sys.modules["__main__"] = module
    return module.__dict__


def _connect_streams(stdin: str) -> None:
    """stdin holds the text; output is written line by line: a killed call still shows it."""
    _feed(_bytes(stdin))
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8", errors="replace")  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _bytes(text: str) -> bytes:
    """UTF-8; text that is not Unicode reaches the code unchanged."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _feed(data: bytes) -> None:
    """Make descriptor 0 read the data: from memory, or through a pipe where it is longer than a
    file may be.
    """
    memory = os.memfd_create("stdin")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(memory, 0, os.SEEK_SET)
        os.dup2(memory, 0)
    except OSError:
        reading, writing = os.pipe()
        os.dup2(reading, 0)
        os.close(reading)
        threading.Thread(target=_write_and_close, args=(writing, data), daemon=True).start()
    finally:
        os.close(memory)


def _write_and_close(descriptor: int, data: bytes) -> None:
    try:
        write_all(descriptor, data)
    except OSError:
        pass  # nothing reads it any more
    finally:
        os.close(descriptor)


def _finish() -> None:
    """The last acts of an interpreter: wait for threads, call the functions of atexit, and flush
    the files that are still open.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for one in gc.get_objects():
        if issubclass(type(one), io.TextIOWrapper | io.BufferedWriter):
            with contextlib.suppress(Exception):
                one.flush()


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message as a line of JSON."""
    write_all(descriptor, json.dumps(message).encode() + b"\n")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, which a pipe takes in parts. OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
