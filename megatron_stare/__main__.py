"""The command line, python -m megatron_stare COMMAND: each function under @command in commands/
is a command.

Exit codes: 0 done, solved, or saved on SIGTERM / SIGUSR1, 1 a fault, 2 something only the user can
put right, in one line, 75 a hang that the watchdog ended, 130 interrupted by Ctrl-C with a
checkpoint to continue from, 141 the reader of the output has gone.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from megatron_stare.commands.arguments import COMMANDS, parse
from megatron_stare.commands.training import INTERRUPTED
from megatron_stare.config import RunAlarm, UserError
from megatron_stare.config.environment import quiet_libraries

# isort: off
# Commands register on import; --help lists them in this order.
import megatron_stare.commands.training
import megatron_stare.commands.models
import megatron_stare.commands.listings
import megatron_stare.commands.configuration
import megatron_stare.commands.algorithms
import megatron_stare.commands.gpuday.gpuday  # noqa: F401
# isort: on

CLOSED_PIPE = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code is its answer."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, because at exit an error of it is a traceback
    except BrokenPipeError:
        if not _reader_has_gone(sys.stdout.fileno(), sys.stderr.fileno()):
            raise  # another pipe than the output's
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return CLOSED_PIPE


def _reader_has_gone(*descriptors: int) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: list[str] | None) -> int:
    options = parse(arguments)
    quiet_libraries()
    try:
        return COMMANDS[options.command].run(options)
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(
            f"error{'' if rank == '0' else f' [rank {rank}]'}: {error}", file=sys.stderr, flush=True
        )
        return 2
    except (RunAlarm, FloatingPointError) as error:
        remedy = "; continue from the last checkpoint with a lower optimizer.lr"
        print(f"error: {error}{'' if isinstance(error, RunAlarm) else remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command starts from the last checkpoint, if any", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
