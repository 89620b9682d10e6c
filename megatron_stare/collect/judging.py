"""The judge of a run, of an evaluation and of `grade`. Imports neither the policy nor an engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_stare.config import Config, SandboxConfig, ScoringConfig, UserError
from megatron_stare.rollout.sandbox.fusion import open_sandbox
from megatron_stare.rollout.sandbox.interpreter import Execution, SandboxError
from megatron_stare.rollout.sandbox.sandbox import CodeRunner
from megatron_stare.scoring.judge import JUDGE, Judge, RewardBackend
from megatron_stare.scoring.llm_judge import LLMJudge
from megatron_stare.scoring.programs.reading import read_tests
from megatron_stare.scoring.programs.verify import SandboxLost, verify_code
from megatron_stare.scoring.verdict import Sample, Verdict, printable, unverifiable

CODE = "code"


def build_judge(config: Config, keep: bool = True) -> Judge:
    """The judge of config.scoring; its user closes it. `keep`: a language model's answers are kept
    in run.dir. UserError for what it cannot work with.
    """
    scoring = config.scoring
    others: dict[str, RewardBackend] = {}
    with contextlib.ExitStack() as on_failure:
        if CODE in scoring.names:
            others[CODE] = CodeRewards(config.sandbox, scoring)
            on_failure.callback(others[CODE].close)
        if JUDGE in scoring.names:
            others[JUDGE] = _llm_judge(config, keep)
            on_failure.callback(others[JUDGE].close)
        judge = Judge(scoring, config.rollout.rollout_max_response_len, others)
        on_failure.pop_all()
        return judge


def _llm_judge(config: Config, keep: bool) -> LLMJudge:
    judge, directory = config.judge, Path(config.run.dir) / "judge"
    kept = directory if keep else None
    if judge.urls:
        return LLMJudge(judge, lambda: judge.urls, kept)
    # Imported here: servers bring torch, which judging alone does not need.
    from megatron_stare.collect.judge_servers import JudgeServers

    servers = JudgeServers(config, directory)
    return LLMJudge(judge, servers.urls, kept, servers.close)


class CodeRewards:
    """The share of a row's tests (metadata.tests,
    or the label) that the response's program passes, in the sandbox.
    """

    def __init__(self, settings: SandboxConfig, scoring: ScoringConfig) -> None:
        self.scoring = scoring
        # A tool's output is cut for the model to read it; a test's must come whole.
        self.output_bytes = max(settings.output_bytes, scoring.code_output_bytes)
        settings = dataclasses.replace(settings, output_bytes=self.output_bytes)
        self.runner: CodeRunner = open_sandbox(settings)
        self._threads = ThreadPoolExecutor(
            settings.max_concurrency, thread_name_prefix="code-rewards"
        )
        self._closed = False

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One Verdict per sample, in order;
        unverifiable where its tests cannot be read or no sandbox answers.
        """
        return list(self._threads.map(self._judge, samples))

    def close(self) -> None:
        """End the sandbox, after the tests that run at this moment."""
        self._closed = True
        self._threads.shutdown(cancel_futures=True)
        self.runner.close()

    def _run(self, code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        if self._closed:
            raise SandboxLost("the sandbox was closed")
        return self.runner.run(code, stdin, wall_seconds)

    def _judge(self, sample: Sample) -> Verdict:
        try:
            tests = read_tests(sample.metadata.get("tests", sample.label))
            longest = max(len(test.stdout.encode()) for test in tests)
            if longest > self.output_bytes:
                return unverifiable(
                    f"a test expects {longest} bytes on stdout, and scoring.code_output_bytes="
                    f"{self.scoring.code_output_bytes}; raise it"
                )
            found = verify_code(
                sample.response,
                tests,
                self._run,
                stop_at_failure=not self.scoring.code_partial_credit,
                seconds=self.scoring.code_seconds,
            )
        except (UserError, ValueError, SandboxError, SandboxLost) as error:
            return unverifiable(str(error))
        except Exception as error:  # over a row's tests, which may hold anything: never the run's
            return unverifiable(printable(f"{type(error).__name__}: {error}"))
        share = found.passed / found.total
        value = share if self.scoring.code_partial_credit else float(found.correct)
        return Verdict(value, "correct" if found.correct else "wrong", found.code)
