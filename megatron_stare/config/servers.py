"""The sections about SGLang servers and the sandbox for code."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from megatron_stare.config.section import (
    Count,
    Integer,
    Number,
    Positive,
    Whole,
    section,
)

MEMORY_SHARE = "--mem-fraction-static"  # a server's argument
# The variable with that part of a GPU's memory which the plan leaves colocated servers. A run keeps
# its configuration, which therefore has no figure of one machine.
SHARE_VARIABLE = "MEGATRON_STARE_SERVER_SHARE"


@section
class SGLangConfig:
    """SGLang servers for rollout.engine=sglang: running ones named by `urls`, or servers that the
    run starts, watches and ends (docs/sglang.md).
    """

    urls: list[str] = Field(default_factory=list)
    """Addresses of running servers, e.g. `[http://node1:30000]`; empty starts servers."""
    reference_urls: list[str] = Field(default_factory=list)
    """Addresses of running servers of the reference policy or teacher, which read the rollouts
    instead of a copy in the trainer (docs/distillation.md)."""
    router_url: str = ""
    """Address of a running sglang-router that distributes generation requests; other requests go to
    its workers, or to sglang.urls."""
    colocated: bool = False
    """Run the servers on the trainer's GPUs; they release their memory while the trainer works."""
    num_servers: Count = 1
    """Number of servers that the run starts."""
    gpus_per_server: Count = 1
    """Number of GPUs over which a started server splits the model (its --tp-size)."""
    first_gpu: Whole | None = None
    """Number of the first GPU of the first started server; later servers use the next GPUs. Unset
    is the GPU after those that train here, or 0 for colocated servers and the command `serve`."""
    python: str = ""
    """Python interpreter with SGLang that starts a server; empty uses SGLANG_PYTHON, else the
    trainer's interpreter on CUDA and that of .venv-sglang on a CPU."""
    command: str = ""
    """Complete command that starts a server, used instead of sglang.python; empty is
    `python -m sglang.launch_server` on CUDA and tools/sglang_cpu/serve on a CPU."""
    server_args: str = ""
    """Further command-line arguments of each started server."""
    host: str = "127.0.0.1"
    """Network interface on which started servers listen."""
    port: Annotated[Integer, Ge(0), Le(65535)] = 0
    """Port of the first started server; later servers use the next ports; 0 picks free ports."""
    api_key: str = Field(default="", repr=False)
    """Key that is sent with every request and given to started servers; empty uses SGLANG_API_KEY.
    It is never written to config.yaml."""
    start_timeout: Positive = 600.0
    """Seconds without a new line in the log of a starting server after which the start has failed,
    at the latest after ten times as long; a running server of sglang.urls must answer within it."""
    max_restarts: Whole = 20
    """Maximum number of restarts of dead servers in one run."""
    restart_backoff: Annotated[Number, Ge(0), Le(60)] = 1.0
    """Seconds before a server's second restart in a row, doubled each time, up to one minute."""
    deterministic: bool = False
    """Let servers sample by each request's seed alone, which is slower (docs/sglang.md)."""
    speculation: Literal["none", "ngram"] = "none"
    """Let GPU servers draft tokens by n-grams and verify several at once (docs/speculation.md)."""
    draft_tokens: Count = 4
    """Number of tokens that a server drafts in one decoding step with sglang.speculation=ngram."""
    max_concurrency: Count = 256
    """Maximum number of concurrent requests to one server."""
    request_timeout: Positive = 600.0
    """Seconds since the last streamed part of an answer after which the request is ended and
    continued from the tokens received so far, on the same server if it has room."""
    queue_timeout: Positive = 3600.0
    """Seconds within which the first part of an answer must come, the wait in the server's queue
    included; without streaming, the whole answer."""
    stream_interval: Whole = 512
    """Number of tokens in each streamed part of an answer, the most that a time-out or a dead
    server can cost; 0 sends answers whole."""
    max_attempts: Count = 6
    """Number of failed answers to one request after which the run ends."""
    health_interval: Positive = 5.0
    """Seconds between two health checks of a server."""
    health_timeout: Positive = 60.0
    """Seconds of silence, over three or more health checks, after which a server counts as dead."""
    weights: Literal["policy", "fp8", "fp8_uncorrected"] = "policy"
    """Number format of the servers' weights: that of the policy, or E4M3 blocks of 128 x 128
    (docs/fp8_servers.md); `fp8_uncorrected` allows fp8 without a mismatch correction."""
    sync_method: Literal["broadcast", "tensor", "disk", "delta"] | None = None
    """Transport of new weights: `broadcast` over NCCL (gloo on a CPU), `tensor` over HTTP or as
    memory handles if colocated, `disk` through files, `delta` sends only changes to weight relays;
    unset uses `tensor` for colocated servers, else `broadcast`."""
    sync_bucket_mib: Count = 512
    """Size in MiB of the buckets of a weight sync, which bounds its extra memory."""
    sync_timeout: Positive = 600.0
    """Seconds within which one bucket of weights must arrive."""
    sync_directory: str = ""
    """Directory that all servers can read, for sglang.sync_method=disk; empty is run.dir/weights.
    The run only touches a subdirectory of its own."""
    relays: list[str] = Field(default_factory=list)
    """Addresses of weight relays (`python -m megatron_stare relay`) for sglang.sync_method=delta,
    e.g. `[http://site:31000]`: one for all servers, or one for each in order."""
    full_sync_interval: Whole = 50
    """Number of delta syncs after which all weights are sent; 0 sends them only when required."""
    master_address: str = ""
    """Address at which servers reach this trainer; empty detects it."""
    verify_weights: bool = True
    """Compare checksums of the weights after every weight sync."""

    @property
    def transport(self) -> str:
        """sglang.sync_method, or what it is where it is unset."""
        return self.sync_method or ("tensor" if self.colocated else "broadcast")


@section
class SandboxConfig:
    """The sandbox in which Python code from the model runs (docs/tools.md)."""

    isolation: Literal["auto", "bubblewrap", "limits"] = "auto"
    """Protection around the code: `bubblewrap` (namespaces), `limits` (needs no program), or
    `auto`, which is bubblewrap if it works, else limits, but never as root."""
    url: str = ""
    """Address of a SandboxFusion server that runs the code instead, with its own isolation."""
    stateful: bool = False
    """Keep variables over the turns of an episode; if false, each call gets a new interpreter."""
    max_sessions: Count = 64
    """Maximum number of sessions that keep a process between calls; beyond it, the session idle for
    longest loses its process and variables."""
    max_concurrency: Count = 16
    """Maximum number of calls that run at once; further calls wait."""
    warm_workers: Whole = 4
    """Number of idle interpreters kept ready; 0 starts one for every call."""
    python: str = ""
    """Python (3.12 or newer) whose packages the code can import; empty uses the trainer's."""
    preload: list[str] = Field(default_factory=list)
    """Modules that an interpreter imports before the call, e.g. `[numpy, sympy]`."""
    wall_seconds: Positive = 10.0
    """Time limit of one call, in seconds."""
    cpu_seconds: Positive = 10.0
    """CPU time limit of each process of a call, in seconds, over all its threads."""
    memory_mib: Annotated[Integer, Ge(64)] = 1024
    """Address space of each process in MiB, preloaded modules included."""
    max_processes: Count = 16
    """Maximum number of processes and threads at once."""
    file_mib: Count = 16
    """Maximum size of one file, in MiB."""
    disk_mib: Count = 64
    """Maximum size of all files together, in MiB; each file counts at least 4 KiB."""
    open_files: Annotated[Integer, Ge(16)] = 64
    """Maximum number of open files in each process."""
    output_bytes: Count = 65536
    """Maximum number of bytes on stdout, and on stderr; a call that prints more is ended."""
    start_timeout: Positive = 60.0
    """Seconds within which a started interpreter must answer, preloading included."""
    max_attempts: Count = 4
    """Number of failed requests to sandbox.url, or failed interpreter starts, for one call after
    which the run ends."""
