"""Accept lengths of n-gram drafts: by hand, against a search without an index, and of a run."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import override
from megatron_stare.debug.speculation import SOURCES, Measured, Text, measure, texts
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.record import recorded_groups
from megatron_stare.loop.run_directory import read_head, records_directory
from megatron_stare.loop.trainer import Trainer
from megatron_stare.planning.plan import make_plan
from megatron_stare.planning.serving import Drafts
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from megatron_stare.recipes import cluster_of, find_recipe
from megatron_stare.records import Group, Prompt, Rollout
from tests.distributed import run_distributed
from tests.small_run import small_config


def rollout(ids: list[int], mask: list[bool] | None = None) -> Rollout:
    own = mask or [True] * len(ids)
    return Rollout(ids, [-1.0] * len(ids), own, status="completed", weight_version=0)


def step_of(*groups: tuple[list[int], list[Rollout]], step: int = 0) -> list[Text]:
    """A step of groups, each a prompt and its rollouts."""
    made = [Group(Prompt(n, ids, ""), tuple(each)) for n, (ids, each) in enumerate(groups)]
    return texts(made, step)


def counted(measured: Measured) -> tuple[int, int, int, int]:
    total = measured.total
    return total.tokens, total.steps, total.drafted, total.accepted


def test_drafts_from_the_own_text_equal_a_hand_count() -> None:
    """1 2 3 | 1 2 3 1 2 3: the first token has no earlier place of 3; then 2 3 are drafted."""
    measured = measure([step_of(([1, 2, 3], [rollout([1, 2, 3, 1, 2, 3])]))], "own", 2, 8)
    # steps: {1}, {2 3 1}, {2 3}: the last one drafts 2 tokens, and the last token is free
    assert counted(measured) == (6, 3, 4, 3)
    assert measured.total.accept_length == 2


def test_a_sibling_in_step_gives_no_draft_and_an_earlier_response_does() -> None:
    same = ([9], [rollout([1, 2, 3, 4]), rollout([1, 2, 3, 4])])
    for source in ("group", "step"):
        assert counted(measure([step_of(same)], source, 4, 8)) == (8, 8, 0, 0)
    later = [step_of(same), step_of(same, step=1)]
    measured = measure(later, "earlier", 4, 8)
    assert measured.total.steps == 8 + 2 and measured.by_origin["earlier"].tokens == 8
    assert (
        measure([step_of(same), step_of(([8], same[1]), step=1)], "earlier", 4, 8).total.steps == 16
    )


def test_a_sibling_further_ahead_gives_drafts() -> None:
    """The first sibling repeats itself, so that it is in front when the second one comes there."""
    front, later = [5, 5, 5, 5, 5, 5, 7, 8], [1, 2, 3, 4, 9, 7, 8, 6]
    measured = measure([step_of(([5, 5, 5], [rollout(front), rollout(later)]))], "group", 4, 8)
    assert measured.by_origin["sibling"].accepted > 0
    assert "sibling" not in measure([step_of(([5], [rollout(front)]))], "own", 4, 8).by_origin


def test_a_draft_ends_with_the_turn() -> None:
    """Tool output (7 8) is known at once, costs no step and is never accepted."""
    ids, mask = [1, 2, 7, 8, 1, 2, 7, 8, 3], [True, True, False, False] * 2 + [True]
    measured = measure([step_of(([4], [rollout(ids, mask)]))], "own", 4, 8)
    assert counted(measured)[:2] == (5, 5)  # 1, 2, 1, 2, 3: one token before each turn's end
    assert step_of(([4], [rollout(ids, [False] * 9)])) == []


def by_search(
    steps: list[list[Text]], source: str, draft_tokens: int, longest: int
) -> tuple[int, int]:
    """Tokens and decoding steps: every known text is searched, the latest known place first."""
    old: list[list[int]] = []
    tokens = decoding = 0
    for step in steps:
        whole = [numpy.frombuffer(text.content, "<i4").tolist() for text in step]
        known = [text.start for text in step]
        clock = [[0] * len(each) for each in whole]  # when each token became known
        now = 0
        while any(at < len(each) for at, each in zip(known, whole, strict=True)):
            now += 1
            ahead = list(known)
            for number, (text, ids) in enumerate(zip(step, whole, strict=True)):
                if known[number] == len(ids):
                    continue
                group = [n for n, each in enumerate(step) if each.group == text.group]
                seen = {"own": [number], "group": group, "step": list(range(len(step)))}[source]
                best: tuple[int, int, int, int] | None = None
                for n in range(min(longest, known[number]), 0, -1):
                    suffix = ids[known[number] - n : known[number]]
                    places = [
                        (clock[m][end], m, end)
                        for m in seen
                        for end in range(n, known[m])
                        if whole[m][end - n : end] == suffix
                    ]
                    if places:
                        _, m, end = max(places)
                        best = (n, m, end, 0)
                        break
                accepted = 0
                if best is not None:
                    _, m, end, _ = best
                    draft = whole[m][end : min(end + draft_tokens, known[m])]
                    rest = ids[known[number] :]
                    while (
                        accepted < min(len(draft), len(rest) - 1)
                        and draft[accepted] == rest[accepted]
                    ):
                        accepted += 1
                ahead[number] = known[number] + accepted + 1
                tokens += accepted + 1
                decoding += 1
            for number, last in enumerate(ahead):
                clock[number][known[number] : last] = [now] * (last - known[number])
            known = ahead
        old.extend(whole)
    return tokens, decoding


@pytest.mark.parametrize("source", ["own", "group", "step"])
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_the_index_equals_a_plain_search(source: str, draft_tokens: int) -> None:
    dice = random.Random(0)
    for longest in (1, 3, 6):
        groups = [
            (
                [dice.randrange(3) for _ in range(4)],
                [rollout([dice.randrange(3) for _ in range(dice.randrange(1, 40))]) for _ in "123"],
            )
            for _ in range(3)
        ]
        total = measure([step_of(*groups)], source, draft_tokens, longest).total
        want = by_search([step_of(*groups)], source, draft_tokens, longest)
        assert (total.tokens, total.steps) == want
        assert total.tokens > 1.1 * total.steps


def recorded(directory: Path, topology: Topology) -> bool:
    config = override(small_config(directory), ["run.record=all", "train.num_rollout=2"])
    return Trainer(config, topology).run(Interrupt())


def on_two_ranks(rank: int, size: int, directory: str) -> bool:
    config = small_config(Path(directory))
    return recorded(Path(directory), topologies.start(config.policy))


def test_the_command_reads_every_ranks_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_config(tmp_path)
    assert run_distributed(on_two_ranks, 2, str(tmp_path)) == [True, True]
    run = tmp_path / "run"
    assert main(["speculate", str(run), "--draft-tokens", "2", "--recipe", "short_cot_7b"]) == 0
    printed = capsys.readouterr().out
    head = read_head(records_directory(run), 1)
    groups = recorded_groups(records_directory(run), head)
    assert set(head.holders) == {0, 1} and len(groups) == len(head.holders)
    both = [
        each
        for step in (1, 2)
        for each in recorded_groups(records_directory(run), read_head(records_directory(run), step))
    ]
    tokens = sum(rollout.loss_tokens for group in both for rollout in group.rollouts)
    assert (
        f"2 steps, {sum(len(group.rollouts) for group in both)} sequences, {tokens} tokens"
        in printed
    )
    assert all(f"{source} " in printed for source in SOURCES)
    assert "short_cot_7b: rollouts [s]" in printed and "break-even" in printed


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ((), "has no records of rollouts"),
        (("--draft-tokens", "2,0"), "--draft-tokens 2,0 must be positive numbers"),
        (("--match", "0"), "--match 0 must be positive"),
        (("--steps", "-1"), "--steps -1 must be positive"),
        (("--recipe", "quickstart"), "--recipe quickstart must name a recipe with GPUs"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], further: tuple[str, ...], words: str
) -> None:
    assert main(["speculate", str(tmp_path), *further]) == 2
    assert words in capsys.readouterr().err


def test_the_plan_pays_for_verification_and_gains_by_the_accept_length() -> None:
    config, cluster = find_recipe("long_cot_32b"), cluster_of("long_cot_32b")
    assert cluster is not None

    def seconds(drafts: Drafts) -> float:
        plan = make_plan(config, cluster, drafts=drafts)
        assert plan.serving is not None
        return plan.serving.seconds

    plain = seconds(Drafts())
    assert seconds(Drafts(4, 1.0)) > plain > seconds(Drafts(4, 2.0))
    assert seconds(Drafts(8, 2.0)) > seconds(Drafts(4, 2.0))
