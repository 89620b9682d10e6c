"""The result of running Python, and the interface of what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["ok", "error", "timeout", "memory", "killed", "output limit"]
OnStart = Callable[[], None] | None
_RESTARTED = "[variables and files of earlier calls are gone: too many sessions were open]"


@dataclass(frozen=True)
class Execution:
    """The result of one call.

    `reason`: ok; error (an exception, or an exit status other than 0; stderr has it); timeout;
    memory; killed (by a signal, or the process ended before the code was done); output limit.
    """

    stdout: str
    stderr: str
    value: str | None  # the repr of a last expression that is not None, as a REPL shows it
    reason: Reason
    seconds: float  # wall time
    detail: str = ""  # an explanation, if `reason` is neither ok nor error
    alive: bool = False  # the session has kept its variables
    lost: bool = False  # the sandbox itself ended without an answer; `reason` is then killed
    # The session lost its variables before this call: too many were open (sandbox.max_sessions).
    restarted: bool = False

    @property
    def ok(self) -> bool:
        return self.reason == "ok"

    def message(self) -> str:
        """The text for the model: output, errors, value, and why the code ended early."""
        parts = [_RESTARTED] if self.restarted else []
        parts += [self.stdout, self.stderr, self.value or ""]
        if self.reason not in ("ok", "error"):
            parts.append(f"[{self.reason}: {self.detail}]")
        text = "\n".join(part.rstrip("\n") for part in parts if part)
        return text or "[no output]"


class CodeRunner(Protocol):
    """The interface of local and remote sandboxes. Thread-safe."""

    def run(self, code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        """Run code in a fresh interpreter; `wall_seconds` can only lower the configured limit."""
        ...

    async def run_async(self, code: str, on_start: OnStart = None) -> Execution:
        """`run` for coroutines. `on_start` is called, in any thread, when the wait for a free place
        is over.
        """
        ...

    def close(self) -> None:
        """End every process and connection."""
        ...
