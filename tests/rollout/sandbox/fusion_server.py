"""SandboxFusion's /run_code in front of the local sandbox:
a real server for the tests of the client.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from megatron_stare.rollout.sandbox.sandbox import Sandbox


class SandboxServer(ThreadingHTTPServer):
    """`faults` are used up first, one per request:
    a status code, bytes to answer with, or "close".
    """

    daemon_threads = True

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sandbox = sandbox
        self.faults: list[int | bytes | str] = []
        self.requests: list[dict] = []
        self.running = self.most_running = 0
        self.guard = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: SandboxServer

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.guard:
            server.requests.append(body)
            fault = server.faults.pop(0) if server.faults else None
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        status, answer = 200, fault
        if fault is None:
            answer = json.dumps(self.execute(body)).encode()
        elif isinstance(fault, int):
            status, answer = fault, b"no"
        # Before the reply: its reader may send another request at once.
        with server.guard:
            server.running -= 1
        if isinstance(answer, bytes):
            self.reply(status, answer)

    def execute(self, body: dict) -> dict:
        assert self.path == "/run_code"
        assert body["language"] == "python"
        started = time.monotonic()
        result = self.server.sandbox.run(body["code"], body["stdin"], body["run_timeout"])
        timeout = result.reason == "timeout"
        return {
            "status": "Success" if result.ok else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": "TimeLimitExceeded" if timeout else "Finished",
                "execution_time": time.monotonic() - started,
                "return_code": None
                if timeout
                else 0
                if result.ok
                else -9
                if result.reason == "killed"
                else 1,
                "stdout": result.stdout,
                "stderr": result.stderr,
            },
            "executor_pod_name": None,
            "files": {},
        }

    def reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
