"""The judge of a run, of an evaluation and of `grade`. Imports neither the policy nor an engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_stare.config import Config, SandboxConfig, UserError
from megatron_stare.rollout.sandbox.process import SandboxError
from megatron_stare.rollout.sandbox.remote import open_sandbox
from megatron_stare.rollout.sandbox.sandbox import CodeRunner
from megatron_stare.scoring.code_tests import read_tests, verify_code
from megatron_stare.scoring.judge import Judge
from megatron_stare.scoring.verdict import Sample, Verdict, unverifiable

CODE = "code"


def build_judge(config: Config) -> Judge:
    """The judge of scoring.reward and scoring.rewards;
    its user closes it. UserError for what it cannot work with.
    """
    scoring = config.scoring
    names = scoring.rewards or {scoring.reward: 1.0}
    others = {CODE: CodeRewards(config.sandbox)} if CODE in names else None
    return Judge(scoring, config.rollout.rollout_max_response_len, others)


class CodeRewards:
    """The share of a row's tests (metadata.tests,
    or the label) that the response's program passes, in the sandbox.
    """

    def __init__(self, settings: SandboxConfig) -> None:
        self.runner: CodeRunner = open_sandbox(settings)
        self._threads = ThreadPoolExecutor(
            settings.max_concurrency, thread_name_prefix="code-rewards"
        )

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One Verdict per sample, in order;
        unverifiable where its tests cannot be read or no sandbox answers.
        """
        return list(self._threads.map(self._judge, samples))

    def close(self) -> None:
        """End the sandbox."""
        self._threads.shutdown()
        self.runner.close()

    def _judge(self, sample: Sample) -> Verdict:
        try:
            found = verify_code(
                sample.response,
                read_tests(sample.metadata.get("tests", sample.label)),
                self.runner.run,
            )
        except (UserError, ValueError, SandboxError) as error:
            return unverifiable(str(error))
        return Verdict(
            found.passed / found.total, "correct" if found.correct else "wrong", found.code
        )
