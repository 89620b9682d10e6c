"""The judge: weighted sums, unverifiable and overlong rollouts, user rewards,
remote reward models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from megatron_stare.config import Config, ScoringConfig, UserError, override
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.scoring.advantages import has_signal, with_advantages
from megatron_stare.scoring.judge import MAX_KILLED, MAX_WITHOUT_VERDICT, Judge, judgement_metrics
from megatron_stare.scoring.verdict import Sample

CASES = "tests.scoring.verifier_cases"


def scoring(*overrides: str) -> ScoringConfig:
    return override(Config(), [f"scoring.{item}" for item in overrides]).scoring


def rollout(text: str, length: int = 3, status: str = "completed") -> Rollout:
    return Rollout(
        (1,) * length, (0.0,) * length, (1,) * length, status=status, weight_version=0, text=text
    )  # type: ignore[arg-type]


def judge(
    settings: ScoringConfig, *rollouts: Rollout, label: str = "4", limit: int = 10
) -> list[Rollout]:
    with contextlib.closing(Judge(settings, limit)) as made:
        return made.judge([(Prompt(0, (1,), label), one) for one in rollouts])


def test_the_default_is_math_alone() -> None:
    right, wrong = judge(ScoringConfig(), rollout("\\boxed{4}"), rollout("\\boxed{5}"))
    assert (right.reward, right.verdict, right.reward_parts) == (1.0, "correct", {"math": 1.0})
    assert (wrong.reward, wrong.verdict, wrong.reward_parts) == (0.0, "wrong", {"math": 0.0})
    assert right.loss_mask.tolist() == wrong.loss_mask.tolist() == [1, 1, 1]


def test_a_weighted_sum_shows_its_parts() -> None:
    settings = scoring(
        f"rewards={{math: 1, format: 0.1, {CASES}.half: -0.5}}",
        "format_pattern='^<think>'",
        "verifier_processes=1",
    )
    one, two = judge(
        settings, rollout("<think></think>\\boxed{4}"), rollout("<think></think>\\boxed{5}")
    )
    assert one.reward == pytest.approx(1 + 0.1 - 0.25) and two.reward == pytest.approx(0.1 - 0.25)
    assert one.reward_parts == {"math": 1.0, "format": 1.0, f"{CASES}.half": 0.5}
    assert (one.verdict, two.verdict) == ("correct", "wrong"), (
        "scoring.reward decides, whatever the sum"
    )


def test_an_unverifiable_rollout_is_masked_and_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    settings = scoring(f"reward={CASES}.picky")
    bad, good = judge(settings, rollout("x"), rollout("1"))
    assert (bad.reward, bad.verdict, tuple(bad.loss_mask), bad.advantage) == (
        None,
        "unverifiable",
        (0, 0, 0),
        0.0,
    )
    assert (good.reward, good.verdict, tuple(good.loss_mask)) == (1.0, "correct", (1, 1, 1))
    warning = capsys.readouterr().err
    assert (
        "1 of 2 responses could not be judged" in warning
        and "could not convert string to float: 'x'" in warning
    )


def test_a_users_function_has_a_deadline() -> None:
    settings = scoring(f"reward={CASES}.endless", "function_timeout=1", "verifier_processes=1")
    hung, good = judge(settings, rollout("x"), rollout("1"))
    assert (hung.reward, hung.verdict, hung.verifier_kills) == (None, "unverifiable", 2)
    assert (good.reward, good.verdict) == (1.0, "correct")
    with contextlib.closing(Judge(settings, 10)) as made:
        [verdict] = made.verdicts([Sample("x", "")])
    reason = "no verdict within 1 s; scoring.function_timeout sets this limit"
    assert verdict.reason == f"{CASES}.endless: {reason}"


def test_a_users_function_may_stay_in_the_trainers_process() -> None:
    for overrides, own in (((), False), (("function_timeout=0",), True)):
        with contextlib.closing(Judge(scoring(f"reward={CASES}.process", *overrides))) as made:
            [verdict] = made.verdicts([Sample("", "")])
        assert (verdict.value == os.getpid()) is own


def test_one_part_without_a_value_makes_the_sum_unverifiable() -> None:
    settings = scoring(f"rewards={{math: 1, {CASES}.not_finite: 1}}", "verifier_processes=1")
    [found] = judge(settings, rollout("\\boxed{4}"))
    assert (
        found.reward is None
        and found.verdict == "unverifiable"
        and found.reward_parts == {"math": 1.0}
    )


def test_a_response_without_an_answer_is_counted() -> None:
    settings = scoring("reward=math", "verifier_processes=1")
    found = judge(settings, rollout("\\boxed{4}"), rollout("\\boxed{5}"), rollout("I do not know"))
    assert [one.answered for one in found] == [True, True, False]
    metrics = judgement_metrics(found)
    assert metrics["no_answer_fraction"] == pytest.approx(1 / 3) == metrics["accuracy"]


def test_a_killed_verifier_is_counted() -> None:
    settings = scoring(f"reward={CASES}.obedient", "verifier_processes=1")
    found = judge(settings, rollout("exit"), rollout("4"))
    assert [one.verdict for one in found] == ["unverifiable", "correct"]
    metrics = judgement_metrics(found)
    assert metrics == {
        "reward": 1.0,
        "accuracy": 1.0,
        "no_answer_fraction": 0.0,
        f"reward/{CASES}.obedient": 1.0,
        "unverifiable": 1.0,
        "verifier_kills": 2.0,
    }
    assert "reward" not in judgement_metrics(found[:1])


def test_a_verifier_without_any_verdict_ends_the_run() -> None:
    settings = scoring(f"reward={CASES}.picky")
    with pytest.raises(
        UserError, match=r"could judge none of the first 64 .*could not convert string"
    ):
        judge(settings, *[rollout("x")] * MAX_WITHOUT_VERDICT)
    judge(settings, *[rollout("x")] * (MAX_WITHOUT_VERDICT - 1))
    judge(settings, *[rollout("x")] * MAX_WITHOUT_VERDICT, rollout("1"))


def test_episodes_that_all_fail_are_no_fault_of_the_reward() -> None:
    failed = dataclasses.replace(rollout("x"), episode={"errors": 1.0, "failed/host": 1.0})
    with pytest.raises(
        UserError, match=r"error failed/host\); they failed before they were scored"
    ):
        judge(scoring(f"reward={CASES}.picky"), *[failed] * MAX_WITHOUT_VERDICT)


def test_a_reward_that_only_hangs_ends_the_run_early() -> None:
    """Sixty-four would take 64 deadlines, twice each."""
    settings = scoring(f"reward={CASES}.endless", "function_timeout=0.5", "verifier_processes=4")
    with pytest.raises(UserError, match=r"none of the first 8 .*no verdict within 0.5 s"):
        judge(settings, *[rollout("x")] * MAX_KILLED)
    judge(settings, *[rollout("x")] * (MAX_KILLED - 1))


def test_shaping_replaces_the_decisive_value_alone() -> None:
    """Weight 2 x (-0.8: three turns of a wrong answer) + 0.1 x 1 for the format."""
    settings = scoring(
        "rewards={math: 2, format: 0.1}", "format_pattern='^<think>'", "shaping=retool"
    )
    texts = ("<think></think>\\boxed{4}", "<think></think>\\boxed{5}")
    asked = [dataclasses.replace(rollout(text), episode={"turns": 3.0}) for text in texts]
    right, wrong = judge(settings, *asked)
    assert right.reward == pytest.approx(2.1) and wrong.reward == pytest.approx(-1.5)
    assert wrong.reward_parts == {"math": pytest.approx(-0.8), "format": 1.0}
    assert (right.verdict, wrong.verdict) == ("correct", "wrong")


def test_overlong_penalty_and_filter() -> None:
    settings = scoring(
        f"reward={CASES}.half", "overlong_buffer_len=4", "overlong_penalty_factor=0.5"
    )
    short, long, cut = judge(settings, rollout("", 6), rollout("", 8), rollout("", 10, "truncated"))
    assert [one.reward for one in (short, long, cut)] == [0.5, 0.25, 0.0]
    assert [one.reward_parts["overlong"] for one in (short, long, cut)] == [0.0, -0.25, -0.5]
    assert cut.loss_mask.tolist() == [1] * 10
    short, cut = judge(
        dataclasses.replace(settings, overlong_filter=True),
        rollout("", 6),
        rollout("", 10, "truncated"),
    )
    assert (
        short.loss_mask.tolist() == [1] * 6
        and cut.loss_mask.tolist() == [0] * 10
        and cut.reward == 0.0
    )


def test_unverifiable_rollouts_leave_mean_and_spread() -> None:
    settings = scoring(f"reward={CASES}.picky")
    judged = judge(settings, rollout("1"), rollout("x"), rollout("0"), rollout("x"), rollout("0"))
    prompt = Prompt(0, (1,), "4")
    verified = [one for one in judged if one.reward is not None]
    whole, alone = (
        with_advantages([Group(prompt, tuple(some))], settings)[0] for some in (judged, verified)
    )
    assert [one.advantage for one in whole.rollouts if one.reward is not None] == [
        r.advantage for r in alone.rollouts
    ]
    assert [one.advantage for one in whole.rollouts if one.reward is None] == [0.0, 0.0]
    assert has_signal(whole)
    (lonely,) = with_advantages([Group(prompt, tuple(judged[:2]))], settings)
    assert not has_signal(lonely) and [one.advantage for one in lonely.rollouts] == [0.0, 0.0]


def test_a_group_without_a_loss_token_has_no_signal() -> None:
    judged = [dataclasses.replace(rollout("", 2), reward=r, loss_mask=(0, 0)) for r in (0.0, 1.0)]
    assert not has_signal(Group(Prompt(0, (1,), ""), tuple(judged)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward=maths"], "did you mean 'math'"),
        (["reward=no.such.module"], "cannot be imported"),
        (["reward=json.__name__"], "is not callable"),
        (
            ["rewards={format: 1}"],
            "'math', which decides right or wrong, is not in scoring.rewards",
        ),
        (["reward=format"], "scoring.format_pattern is empty"),
        (["reward=format", "format_pattern='('"], "not a regular expression"),
        (["reward=remote"], "scoring.remote_url='' is not an address"),
        (["overlong_buffer_len=11"], "exceeds rollout.rollout_max_response_len=10"),
    ],
)
def test_impossible_settings_are_refused_before_any_sample(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        judge(scoring(*overrides))


@pytest.mark.parametrize(
    ("override_text", "message"),
    [
        ("rewards={math: .inf}", "must be a finite number"),
        ("rewards={math: much}", "scoring.rewards.math=much is not of type float"),
        ("extraction=box", "not one of boxed, answer, tag, any"),
        ("verifier_timeout=0", "out of range"),
    ],
)
def test_the_config_refuses(override_text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        scoring(override_text)


class _RewardModel(BaseHTTPRequestHandler):
    """Answers as the response says: a number is its reward;
    `status 500 once` fails the first time only.
    """

    seen: ClassVar[list[dict[str, Any]]] = []
    body: ClassVar[bytes | None] = None  # what to answer instead

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        again = body in self.seen
        self.seen.append(body)
        order = body["response"]
        status = (
            int(order.split()[1])
            if order.startswith("status") and not (order.endswith("once") and again)
            else 200
        )
        answers = {
            "dict": {"reward": 0.7, "verdict": "wrong", "extracted": "seven"},
            "no": {"verdict": "unverifiable"},
        }
        answer = answers.get(order, 0.25 if order.startswith("status") else None)
        text = json.dumps(
            float(order) if answer is None and order not in ("garbage", "odd") else answer
        )
        self.send_response(status)
        self.end_headers()
        page = b"<html>" if order == "garbage" else text.encode()
        self.wfile.write(page if self.body is None else self.body)

    def log_message(self, *arguments: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def reward_model() -> Iterator[str]:
    _RewardModel.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _RewardModel)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_remote_reward_model(reward_model: str) -> None:
    settings = scoring("reward=remote", f"remote_url={reward_model}", "remote_attempts=2")
    orders = ["1.0", "-0.5", "dict", "no", "garbage", "status 503 once", "status 503", "status 404"]
    with contextlib.closing(Judge(settings)) as made:
        prompt = Prompt(0, (1,), "the label", text="the question", metadata={"level": 3})
        verdicts = made.judge([(prompt, rollout(order)) for order in orders])
    assert [one.reward for one in verdicts] == [1.0, -0.5, 0.7, None, None, 0.25, None, None]
    words = [
        "correct",
        "wrong",
        "wrong",
        "unverifiable",
        "unverifiable",
        "correct",
        "unverifiable",
        "unverifiable",
    ]
    assert [one.verdict for one in verdicts] == words
    wanted = {
        "response": "1.0",
        "label": "the label",
        "metadata": {"level": 3},
        "prompt": "the question",
    }
    assert wanted in _RewardModel.seen
    asked = [body["response"] for body in _RewardModel.seen]
    assert (asked.count("status 503"), asked.count("status 404")) == (2, 1)


ODD_ANSWERS = [
    b'{"reward": 1' + b"0" * 400 + b"}",
    b"1" + b"0" * 400,
    b"1" + b"0" * 5000,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"reward": 1e999}',
    b"NaN",
    b"null",
    b"[1]",
    b'"x"',
    b"\xff\xfe\x00",
    b"",
    b"{}",
    b'{"reward": [1]}',
    b'{"reward": null}',
    b'{"verdict": "correct"}',
    b"true",
    b'"1"',
    b'{"reward": true}',
    b'{"reward": "0.5"}',
    b'{"reward": 1, "verdict": {"a": 1}}',
    b'{"reward": 1, "verdict": ["correct"]}',
    b'{"reward": 1, "verdict": "right"}',
    b'{"reward": 1, "extracted": "' + b"x" * (1 << 20) + b'"}',
    b"[" * 900 + b"]" * 900,
    b'{"reward": {"a": 1}, "extracted": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"verdict": "unverifiable", "reason": "\\u001b[2Jforged\\nline \\ud800"}',
]


def test_no_answer_of_a_reward_server_raises(reward_model: str) -> None:
    url = reward_model.replace("//", "//user:secret@")
    settings = scoring("reward=remote", f"remote_url={url}", "remote_attempts=1")
    with contextlib.closing(Judge(settings)) as made:
        for answer in ODD_ANSWERS:
            _RewardModel.body = answer
            try:
                (found,) = made.verdicts([Sample("odd", "")])
            finally:
                _RewardModel.body = None
            assert found.verdict == "unverifiable" and found.reason
            assert found.reason.isprintable() and "secret" not in found.reason


@pytest.mark.parametrize("piece", [b"", b"0" * 65536])
def test_an_answer_without_an_end_is_given_up(piece: bytes) -> None:
    """A server that sends a byte at a time, or bytes for ever: neither time nor memory is lost."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            talk, _ = listening.accept()
            with talk, contextlib.suppress(OSError):
                talk.recv(1 << 16)
                talk.sendall(b"HTTP/1.1 200 OK\r\n\r\n0.")
                while True:
                    talk.sendall(piece or b"0")
                    closed.wait(0 if piece else 0.05)

        closed = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        settings = scoring(
            "reward=remote", f"remote_url={url}", "remote_attempts=1", "remote_timeout=1"
        )
        with contextlib.closing(Judge(settings)) as made:
            (found,) = made.verdicts([Sample("odd", "")])
        thread.join(10)
    assert found.verdict == "unverifiable" and not thread.is_alive()
    assert ("1048576 bytes" if piece else "no whole answer after 1 s") in found.reason


def test_a_reward_model_that_is_not_there_is_unverifiable() -> None:
    settings = scoring("reward=remote", "remote_url=http://127.0.0.1:9/", "remote_attempts=1")
    [found] = judge(settings, rollout("1"))
    assert found.verdict == "unverifiable"
