"""Servers that only read: faults, refusals, and which server is asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy
import pytest

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.rollout.engine import FaultyAnswer
from megatron_stare.rollout.sglang.client import ServerFault
from megatron_stare.rollout.sglang.reference import check_servers, read_logprobs

IDS = [numpy.array([3, 4, 5 + number], numpy.int32) for number in range(6)]


class Reading:
    """A server that knows every token by its id: the log-prob of id n is -n / 10. `status`: of
    every answer; `wrong`: its log-probs are of other ids.
    """

    def __init__(self, status: int = 200, wrong: bool = False) -> None:
        self.asked, self.status, self.wrong = 0, status, wrong
        reading = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                said = {"version": "0", "model_path": "m", "max_req_input_len": 65, "tp_size": 1}
                self._say({"data": [{"max_model_len": 72}]} if "models" in self.path else said)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                reading.asked += 1
                ids = [id + reading.wrong for id in body["input_ids"]]
                read = [[-id / 10, id, None] for id in ids]
                top = [[[-0.1, id, None]] for id in ids]
                self._say({"meta_info": {"input_token_logprobs": read, "input_top_logprobs": top}})

            def _say(self, content: object) -> None:
                data = json.dumps(content).encode()
                self.send_response(reading.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@contextlib.contextmanager
def servers(*servers: Reading) -> Iterator[list[str]]:
    try:
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.http.shutdown()


SETTINGS = SGLangConfig(max_attempts=3, max_concurrency=2)


def expected() -> list[list[float]]:
    return [(ids[1:] / -10).tolist() for ids in IDS]


def test_sequences_are_spread_and_come_back_in_order() -> None:
    one, two = Reading(), Reading()
    with servers(one, two) as urls:
        found = read_logprobs(urls, SETTINGS, 64, IDS)
        assert read_logprobs(urls, SETTINGS, 64, []) == []
    numpy.testing.assert_allclose(found, expected(), rtol=1e-6)
    assert one.asked > 0 < two.asked and one.asked + two.asked == len(IDS)


def test_a_refused_sequence_is_scored_by_another_server() -> None:
    bad, good = Reading(status=500), Reading()
    with servers(bad, good) as urls:
        found = read_logprobs(urls, SETTINGS, 64, IDS)
    numpy.testing.assert_allclose(found, expected(), rtol=1e-6)
    assert good.asked == len(IDS)


@pytest.mark.parametrize(
    ("server", "error"), [({"status": 500}, ServerFault), ({"wrong": True}, FaultyAnswer)]
)
def test_faults_end_after_the_configured_attempts(
    server: dict[str, int], error: type[Exception]
) -> None:
    bad = Reading(**server)  # type: ignore[arg-type]
    with servers(bad) as urls, pytest.raises(error):
        read_logprobs(urls, SETTINGS, 64, IDS[:1])
    assert bad.asked == 3


def test_a_missing_server_and_one_that_scores_too_few_tokens_are_refused() -> None:
    good = Reading()
    with servers(good) as urls:
        check_servers(urls, SETTINGS, 64)
        with pytest.raises(UserError, match=r"reads 64 tokens.*has 65.*--context-length"):
            check_servers(urls, SETTINGS, 65)
    good.http.server_close()
    with pytest.raises(UserError, match=r"sglang.reference_urls: .*start the server"):
        check_servers(urls, SETTINGS, 64)
