"""The live page: on loopback, of the newest files, and no other file."""

from __future__ import annotations

import http.client
import threading

import pytest

from benchmarks._synthetic_run import write_run
from megatron_stare.config import UserError
from megatron_stare.reporting.report import LivePage, server


@pytest.fixture
def served(tmp_path):
    write_run(tmp_path, 3)
    with server([tmp_path], 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        yield tmp_path, serving
        serving.shutdown()
        thread.join()


def ask(serving, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", serving.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def test_the_page_changes_with_its_files_and_only_then(served):
    directory, serving = served
    assert serving.server_address[0] == "127.0.0.1"
    status, headers, body = ask(serving)
    assert status == 200 and b'"live":true' in body and headers["Cache-Control"] == "no-store"
    tag = {"If-None-Match": headers["ETag"]}
    assert ask(serving, **tag)[0] == 304
    write_run(directory, 5)
    status, headers, body = ask(serving, **tag)
    assert status == 200 and b'"rows":5' in body
    (directory / "metrics.jsonl").write_text('{"step": }\n{"step": 1}\n')
    status, _, body = ask(serving)
    assert status == 503 and b"metrics.jsonl:1" in body


def test_a_look_at_the_files_does_not_walk_through_records_and_checkpoints(tmp_path):
    """A long run has a hundred thousand of them, and an open page looks every three seconds."""
    names = ["metrics.jsonl", "diagnostics/step_00000001.json.gz", "seed0/stare/metrics.jsonl"]
    for name in [*names, "records/step_00000001/metrics.jsonl"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [name for name, *_ in LivePage([tmp_path])._state()]
    assert found == sorted(str(tmp_path / name) for name in names)


def test_only_the_page_is_served_and_only_under_its_name(served):
    _, serving = served
    for path in ("/metrics.jsonl", "/../config.yaml", "//etc/passwd", "/favicon.ico"):
        assert ask(serving, path)[0] == 404
    assert ask(serving, Host="evil.example:80")[0] == 421
    assert ask(serving, method="POST")[0] == 501


def test_a_taken_port_and_a_missing_directory_are_refused(served, tmp_path):
    directory, serving = served
    with pytest.raises(UserError, match="--port"):
        server([directory], serving.server_port)
    with pytest.raises(UserError, match="neither"):
        server([tmp_path / "none"], 0)
