"""What running Python comes to, and what runs it: this machine's sandbox or a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["ok", "error", "timeout", "memory", "killed", "output limit"]
Begun = Callable[[], None] | None
_ANEW = "[variables and files of earlier calls are gone: too many sessions were open]"


@dataclass(frozen=True)
class Execution:
    """What one call did. `value` is the repr of a last expression that is not None,
    as a REPL shows it.

    `reason`: ok; error (an exception, or an exit status other than 0; stderr has it); timeout;
    memory; killed (by a signal, or the process ended itself before the code was done); output
    limit. `detail` says more where it is none of the first two. `seconds` is wall time. `alive`:
    the session has kept its variables. `lost`: the sandbox itself ended without an answer, so
    no one knows what the code did (`reason` is then killed). `anew`: the session's variables of
    before this call had been given up for other sessions (sandbox.max_sessions).
    """

    stdout: str
    stderr: str
    value: str | None
    reason: Reason
    seconds: float
    detail: str = ""
    alive: bool = False
    lost: bool = False
    anew: bool = False

    @property
    def ok(self) -> bool:
        return self.reason == "ok"

    def message(self) -> str:
        """What a model is shown: output, errors, value, and why it ended early."""
        parts = [_ANEW] if self.anew else []
        parts += [self.stdout, self.stderr, self.value or ""]
        if self.reason not in ("ok", "error"):
            parts.append(f"[{self.reason}: {self.detail}]")
        text = "\n".join(part.rstrip("\n") for part in parts if part)
        return text or "[no output]"


class CodeRunner(Protocol):
    """What local and remote sandboxes have in common. Thread-safe."""

    def run(
        self,
        code: str,
        stdin: str = "",
        wall_seconds: float | None = None,
        begun: Begun = None,
    ) -> Execution:
        """Run code in a fresh interpreter; `wall_seconds` can only lower the configured limit.
        `begun` is called, in whatever thread, when the wait for a free place is over.
        """
        ...

    async def run_async(
        self,
        code: str,
        stdin: str = "",
        wall_seconds: float | None = None,
        begun: Begun = None,
    ) -> Execution:
        """The same for coroutines."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...
