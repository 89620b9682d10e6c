"""Sequences in micro-batches: budgets, balance, alignment, and that every loss token is placed
exactly once.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config import PolicyConfig, TuningConfig, UserError
from megatron_stare.losses.planning import coefficients
from megatron_stare.numerics.selection import Across
from megatron_stare.policy.layout import FLAT
from megatron_stare.policy.packing import cost, pack
from megatron_stare.records import Group, MicroBatch, Prompt, Rollout, TokenBatch

HIDDEN = 16


@dataclasses.dataclass
class Place:
    """A rank's sizes, without process groups: all that packing reads of a Topology."""

    data_size: int = 1
    data_rank: int = 0
    context_size: int = 1
    context_rank: int = 0
    tensor_size: int = 1
    pipeline_size: int = 1
    virtual_size: int = 1


def groups_of(shapes: list[tuple[int, list[int]]]) -> list[Group]:
    """One group per (prompt length, loss mask); token ids identify sequence and position."""
    groups = []
    for number, (prompt, mask) in enumerate(shapes):
        ids = [1000 * (number + 1) + place for place in range(prompt + len(mask))]
        rollout = Rollout(
            response_ids=tuple(ids[prompt:]),
            logprobs=tuple(-float(token) for token in ids[prompt:]),
            loss_mask=tuple(mask),
            status="completed",
            weight_version=number % 2,
            advantage=float(number),
        )
        groups.append(Group(Prompt(number, tuple(ids[:prompt]), ""), (rollout,)))
    return groups


def several_to_a_group(shapes: list[tuple[int, list[list[int]]]]) -> list[Group]:
    """(prompt length, loss mask of each rollout) of each group."""
    groups = []
    for number, (prompt, masks) in enumerate(shapes):
        alone = [groups_of([(prompt, mask)])[0].rollouts[0] for mask in masks]
        groups.append(Group(Prompt(number, tuple(range(1, prompt + 1)), ""), tuple(alone)))
    return groups


def everywhere(
    groups: list[Group], policy: PolicyConfig, data: int = 1, **sizes: int
) -> list[TokenBatch]:
    """The batches of all data and context ranks."""
    context = sizes.get("context_size", 1)
    places = [Place(data, d, context_rank=c, **sizes) for d in range(data) for c in range(context)]
    return [pack(groups, place, policy, hidden_size=HIDDEN, weight_version=0) for place in places]  # type: ignore[arg-type]


def joined(batches: list[TokenBatch]) -> TokenBatch:
    """The tokens of all ranks together, as one rank would hold them."""
    columns = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in FLAT}
    return dataclasses.replace(batches[0], **columns)


def naive_coefficients(groups: list[Group], aggregation: str) -> list[float]:
    """The coefficient of every loss token in the groups' order, from the rollouts themselves."""
    counts = [
        rollout.loss_tokens for group in groups for rollout in group.rollouts if rollout.loss_tokens
    ]
    weights = {
        "token-mean": lambda count: 1 / sum(counts),
        "seq-mean-token-mean": lambda count: 1 / (len(counts) * count),
        "seq-mean-token-sum": lambda count: 1 / len(counts),
    }
    return [weights[aggregation](count) for count in counts for _ in range(count)]


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
# Groups of several rollouts, some of which have no loss token at all.
SEVERAL = [
    (3, [[1, 1, 0, 1], [1], [0, 0]]),
    (2, [[1, 1], [0, 1, 1, 1, 1, 0, 1], [1, 0, 0]]),
    (5, [[0], [0, 0], [0, 0, 0]]),
    (4, [[1] * 11, [1, 1, 1], [0, 1]]),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("data", "context"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_sequences_and_their_tokens_are_counted_over_all_ranks(
    packed: bool, data: int, context: int
) -> None:
    groups = several_to_a_group(SEVERAL)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    policy = PolicyConfig(max_tokens_per_gpu=24, packed_sequences=packed)
    batches = everywhere(groups, policy, data, context_size=context)
    counts = torch.tensor([rollout.loss_tokens for rollout in rollouts])
    for batch in batches:
        assert batch.num_sequences == len(rollouts) == 12
        assert batch.group_Q.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
        assert torch.equal(batch.sequence_tokens_T, counts[batch.sequence_T])
        assert sum(micro.num_sequences for micro in batch.microbatches) < 12 or data == 1
    together = joined(batches)
    assert torch.bincount(together.sequence_T, minlength=12).tolist() == counts.tolist()
    order = together.token_index_T.argsort()
    for aggregation in AGGREGATIONS:
        found = coefficients(together, aggregation, Across())[order]
        expected = torch.tensor(naive_coefficients(groups, aggregation))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("context", [1, 2])
def test_a_micro_batch_numbers_its_sequences_alike_on_all_context_ranks(
    packed: bool, context: int
) -> None:
    policy = PolicyConfig(max_tokens_per_gpu=24, packed_sequences=packed)
    batches = everywhere(several_to_a_group(SEVERAL), policy, data=2, context_size=context)
    placed: list[int] = []
    for data_rank in range(2):
        sharing = batches[data_rank * context : (data_rank + 1) * context]
        for micros in zip(*(batch.microbatches for batch in sharing), strict=True):
            assert len({micro.num_sequences for micro in micros}) == 1
            placed.append(micros[0].num_sequences)
            numbers: dict[int, int] = {}
            for micro, batch in zip(micros, sharing, strict=True):
                globals_ = batch.sequence_T[micro.rows].tolist()
                for local, number in zip(micro.sequence_N.tolist(), globals_, strict=True):
                    assert 0 <= local < micro.num_sequences
                    assert numbers.setdefault(local, number) == number
            assert len(set(numbers.values())) == len(numbers)
    assert sum(placed) == 12


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("data", [1, 2])
def test_a_sequence_that_is_masked_whole_changes_no_value_and_no_denominator(
    packed: bool, data: int
) -> None:
    """Like an unverifiable or filtered rollout: alone in its batch, or with others."""
    policy = PolicyConfig(max_tokens_per_gpu=64, packed_sequences=packed)
    shapes = [(3, [1, 1, 0, 1]), (2, [1, 1]), (4, [1])]
    without = joined(everywhere(groups_of(shapes), policy, data))
    with_masked = joined(everywhere(groups_of([*shapes, (2, [0, 0, 0])]), policy, data))
    for aggregation in AGGREGATIONS:
        found = [
            dict(
                zip(
                    batch.token_index_T.tolist(),
                    coefficients(batch, aggregation, Across()).tolist(),
                    strict=True,
                )
            )
            for batch in (without, with_masked)
        ]
        assert found[0] == found[1] and len(found[0]) == 6
    alone = everywhere(groups_of([(2, [0, 0, 0])]), policy, data)
    for batch in alone:
        assert batch.advantage_T.numel() == 0 and len(batch.microbatches) == 1
    assert coefficients(joined(alone), "seq-mean-token-mean", Across()).numel() == 0


def expected_tokens(groups: list[Group]) -> dict[int, int]:
    """Global token index -> token id, of every loss token."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        (number << 32) + place: token
        for number, rollout in enumerate(rollouts)
        for place, (token, masked) in enumerate(
            zip(rollout.response_ids, rollout.loss_mask, strict=True)
        )
        if masked
    }


def expected_turns(groups: list[Group]) -> dict[int, int]:
    """Global token index -> how many stretches of loss tokens were over before it."""
    found = {}
    for number, group in enumerate(groups):
        mask = group.rollouts[0].loss_mask.tolist()
        for place in (place for place, masked in enumerate(mask) if masked):
            pairs = itertools.pairwise(mask[: place + 1])
            found[(number << 32) + place] = sum(own and not after for own, after in pairs)
    return found


def input_token_of(batch: TokenBatch, policy: PolicyConfig) -> dict[int, tuple[int, int]]:
    """Global token index -> (the input token whose hidden state predicts it, the target)."""
    found: dict[int, tuple[int, int]] = {}
    for micro in batch.microbatches:
        flat = micro.token_BS.transpose(0, 1).flatten()  # Megatron's order: positions first
        index = batch.token_index_T[micro.rows].tolist()
        pairs = zip(flat[micro.row_N].tolist(), micro.target_N.tolist(), strict=True)
        assert not found.keys() & index
        found |= dict(zip(index, pairs, strict=True))
    return found


SHAPES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 1), min_size=1, max_size=20)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES,
    packed=st.booleans(),
    data=st.integers(1, 3),
    context=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
)
def test_every_loss_token_is_placed_once_after_its_predecessor(
    shapes: Any, packed: bool, data: int, context: int, tensor: int
) -> None:
    groups = groups_of(shapes)
    policy = PolicyConfig(
        max_tokens_per_gpu=40, packed_sequences=packed, sequence_parallel=tensor > 1
    )
    batches = everywhere(groups, policy, data, context_size=context, tensor_size=tensor)
    found: dict[int, tuple[int, int]] = {}
    turns: dict[int, int] = {}
    for batch in batches:
        part = input_token_of(batch, policy)
        assert not found.keys() & part.keys()
        found |= part
        assert batch.turn_T is not None
        turns |= dict(zip(batch.token_index_T.tolist(), batch.turn_T.tolist(), strict=True))
        for column in (
            "advantage_T",
            "rollout_logprob_T",
            "sequence_T",
            "sequence_tokens_T",
            "fresh_T",
            "turn_T",
        ):
            assert len(getattr(batch, column)) == len(batch.token_index_T)
    wanted = expected_tokens(groups)
    assert {index: target for index, (_, target) in found.items()} == wanted
    assert all(token == target - 1 for token, target in found.values())
    assert turns == expected_turns(groups)


def seen_from(micro: MicroBatch, row: int) -> tuple[list[int], list[int]]:
    """Tokens and positions of the rows that attention sees from a row of a packed micro-batch."""
    assert micro.cumulative_lengths is not None
    starts = micro.cumulative_lengths.tolist()
    number = max(place for place, start in enumerate(starts[:-1]) if start <= row)
    first, count = micro.prefixes[number] if micro.prefixes else (0, 0)
    rows = [*range(first, first + count), *range(starts[number], row + 1)]
    return micro.token_BS[0, rows].tolist(), micro.position_BS[0, rows].tolist()


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.integers(1, 6),
            st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=6,
    ),
    data=st.integers(1, 3),
    tensor=st.sampled_from([1, 2]),
)
def test_with_shared_prompts_every_loss_token_sees_its_own_past(
    shapes: Any, data: int, tensor: int
) -> None:
    ids = itertools.count(1)
    groups = [
        Group(
            Prompt(number, tuple(itertools.islice(ids, prompt)), ""),
            tuple(
                Rollout(
                    response_ids=tuple(itertools.islice(ids, len(mask))),
                    logprobs=(-1.0,) * len(mask),
                    loss_mask=tuple(mask),
                    status="completed",
                    weight_version=0,
                )
                for mask in masks
            ),
        )
        for number, (prompt, masks) in enumerate(shapes)
    ]
    whole = [
        [*group.prompt.token_ids, *rollout.response_ids]
        for group in groups
        for rollout in group.rollouts
    ]
    policy = PolicyConfig(max_tokens_per_gpu=24, shared_prompts=True, sequence_parallel=tensor > 1)
    found: dict[int, int] = {}
    rows = 0
    for batch in everywhere(groups, policy, data, tensor_size=tensor):
        for micro in batch.microbatches:
            assert micro.token_BS.shape[1] <= 25
            rows += int((micro.token_BS > 0).sum())
            indices = batch.token_index_T[micro.rows].tolist()
            for index, row, target in zip(
                indices, micro.row_N.tolist(), micro.target_N.tolist(), strict=True
            ):
                tokens, positions = seen_from(micro, row)
                ids_of = whole[index >> 32]
                assert tokens == ids_of[: len(tokens)]
                assert target == ids_of[len(tokens)]
                assert positions == list(range(len(tokens)))
                found[index] = target
    assert found == expected_tokens(groups)
    longest = max(prompt + sum(map(len, masks)) - len(masks) for prompt, masks in shapes)
    if longest <= 24:  # each group's prompt lies in one place
        assert rows == sum(prompt + sum(map(len, masks)) - len(masks) for prompt, masks in shapes)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, packed=st.booleans(), data=st.integers(1, 4), context=st.sampled_from([1, 2]))
def test_budget_count_and_alignment(shapes: Any, packed: bool, data: int, context: int) -> None:
    policy = PolicyConfig(max_tokens_per_gpu=32, packed_sequences=packed, sequence_parallel=True)
    batches = everywhere(groups_of(shapes), policy, data, context_size=context, tensor_size=2)
    assert len({len(batch.microbatches) for batch in batches}) == 1
    for batch in batches:
        for micro in batch.microbatches:
            size, length = micro.token_BS.shape
            assert size * length <= 32, "max_tokens_per_gpu is a hard bound"
            assert length % 2 == 0, "sequence parallelism halves it"
            assert (micro.cumulative_lengths is not None) == packed
            if micro.cumulative_lengths is not None:
                ends = micro.cumulative_lengths.tolist()
                assert ends[-1] == length * context
                assert all(
                    (end - start) % (2 * context if context > 1 else 1) == 0
                    for start, end in itertools.pairwise(ends)
                )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("context", "tensor", "recipe", "rows"),
    [(1, 1, None, 16), (1, 8, "delayed", 16), (2, 1, "blockwise", 128), (4, 2, "mxfp8", 32)],
)
def test_fp8_is_given_rows_that_it_can_multiply(
    packed: bool, context: int, tensor: int, recipe: str | None, rows: int
) -> None:
    """A fixed number at a time on every rank; the values are those of odd lengths."""
    sizes = {"context_size": context, "tensor_size": tensor}
    plain = PolicyConfig(
        max_tokens_per_gpu=512, packed_sequences=packed, sequence_parallel=tensor > 1
    )
    fp8 = dataclasses.replace(plain, fp8="hybrid", tuning=TuningConfig(fp8_recipe=recipe))
    groups = groups_of([(3, [1] * 10), (5, [0, 1] * 7), (2, [1]), (1, [1] * 33)])
    padded, odd = everywhere(groups, fp8, **sizes), everywhere(groups, plain, **sizes)
    for batch in padded:
        for micro in batch.microbatches:
            sequences, length = micro.token_BS.shape
            held = length // tensor if plain.sequence_parallel else length
            assert sequences * held % rows == 0 and length % tensor == 0
            assert sequences * length <= 512
    for one, other in zip(padded, odd, strict=True):
        pairs = [
            {
                index: (pair, advantage)
                for (index, pair), advantage in zip(
                    input_token_of(batch, fp8).items(), batch.advantage_T.tolist(), strict=True
                )
            }
            for batch in (one, other)
        ]
        assert pairs[0].keys() == pairs[1].keys() or context > 1
        assert all(pairs[0][index] == pairs[1][index] for index in pairs[0] if index in pairs[1])


def test_values_follow_their_tokens() -> None:
    groups = groups_of([(2, [1, 0, 1]), (3, [1, 1])])
    (batch,) = everywhere(groups, PolicyConfig())
    order = batch.token_index_T.argsort()
    assert batch.sequence_T[order].tolist() == [0, 0, 1, 1]
    assert batch.advantage_T[order].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert batch.rollout_logprob_T[order].tolist() == [-1002.0, -1004.0, -2003.0, -2004.0]
    assert batch.fresh_T[order].tolist() == [True, True, False, False]
    assert batch.sequence_tokens_T[order].tolist() == [2, 2, 2, 2]
    assert batch.turn_T is not None and batch.turn_T[order].tolist() == [0, 1, 0, 0]


def test_every_rank_knows_the_rewards_of_all_sequences() -> None:
    groups = groups_of([(2, [1, 1]), (3, [1]), (1, [0, 0])])
    judged = [
        dataclasses.replace(
            group, rollouts=(dataclasses.replace(group.rollouts[0], reward=reward),)
        )
        for group, reward in zip(groups, (0.5, None, -1.0), strict=True)
    ]
    for batch in everywhere(judged, PolicyConfig(), data=2):
        assert batch.reward_Q is not None and len(batch.reward_Q) == batch.num_sequences
        assert str(batch.reward_Q.tolist()) == "[0.5, nan, -1.0]"


def test_ranks_share_cost_rather_than_count() -> None:
    groups = groups_of([(1, [1] * 600), *[(1, [1] * 20) for _ in range(120)]])
    policy = PolicyConfig(max_tokens_per_gpu=4096)
    loads = []
    for batch in everywhere(groups, policy, data=2):
        lengths = torch.bincount(batch.sequence_T)
        loads.append(sum(cost(int(length), HIDDEN) for length in lengths if length))
    assert max(loads) / min(loads) < 1.2
    counts = [len(batch.sequence_T.unique()) for batch in everywhere(groups, policy, data=2)]
    assert max(counts) > 3 * min(counts), "the rank with the long sequence has far fewer"


def test_packing_wastes_nothing_where_padding_does() -> None:
    groups = groups_of([(1, [1] * length) for length in (30, 4, 4, 4, 4, 4, 4)])

    def positions(packed: bool) -> int:
        (batch,) = everywhere(groups, PolicyConfig(packed_sequences=packed))
        return sum(micro.token_BS.numel() for micro in batch.microbatches)

    assert positions(True) == 30 + 6 * 4
    assert positions(False) == 7 * 30


def micro_batch_sizes(lengths: list[int], policy: PolicyConfig) -> list[int]:
    (batch,) = everywhere(groups_of([(1, [1] * length) for length in lengths]), policy)
    return sorted(micro.token_BS.numel() for micro in batch.microbatches)


@pytest.mark.parametrize("packed", [True, False])
def test_sequences_that_fill_the_budget_exactly_share_a_micro_batch(packed: bool) -> None:
    policy = PolicyConfig(max_tokens_per_gpu=20, packed_sequences=packed)
    assert micro_batch_sizes([10] * 4, policy) == [20, 20]


def test_micro_batches_of_a_rank_have_even_cost() -> None:
    """First-fit alone would make [16, 32] and [8, 32, 32]."""
    policy = PolicyConfig(max_tokens_per_gpu=32)
    assert micro_batch_sizes([16, 8, 8, 8, 8], policy) == [24, 24]
    assert micro_batch_sizes([32, 16, 8, 8, 8], policy) == [16, 24, 32]


def test_a_sequence_over_the_budget_is_refused_and_never_cut() -> None:
    with pytest.raises(
        UserError, match=r"a sequence has 41 tokens .*policy\.max_tokens_per_gpu=40"
    ):
        everywhere(groups_of([(2, [1] * 40)]), PolicyConfig(max_tokens_per_gpu=40))


def test_a_prompt_without_a_token_is_refused() -> None:
    """Else the last position of another sequence would predict its response's first token."""
    groups = groups_of([(2, [1, 1]), (0, [1, 1])])
    with pytest.raises(UserError, match=r"prompt 1 has no token.*give every prompt some text"):
        everywhere(groups, PolicyConfig(max_tokens_per_gpu=40))


@pytest.mark.parametrize("packed", [True, False])
def test_a_sequence_over_the_budget_may_have_its_own_micro_batch(packed: bool) -> None:
    groups = groups_of([(2, [1] * 4), (2, [1] * 90), (2, [1] * 5)])
    policy = PolicyConfig(
        max_tokens_per_gpu=40, on_long_sequence="own_micro_batch", packed_sequences=packed
    )
    (batch,) = everywhere(groups, policy)
    assert input_token_of(batch, policy).keys() == expected_tokens(groups).keys()
    sizes = sorted(micro.token_BS.numel() for micro in batch.microbatches)
    assert sizes[-1] == 91 and all(size <= 40 for size in sizes[:-1])


def test_ranks_without_a_sequence_get_an_empty_micro_batch() -> None:
    batches = everywhere(groups_of([(2, [1, 1])]), PolicyConfig(), data=3)
    assert [len(batch.token_index_T) for batch in batches] == [2, 0, 0]
    assert all(
        len(batch.microbatches) == 1 and batch.microbatches[0].token_BS.numel() >= 1
        for batch in batches
    )


def test_virtual_stages_get_whole_turns() -> None:
    groups = groups_of([(1, [1] * 30)] * 3)
    (batch,) = everywhere(
        groups, PolicyConfig(max_tokens_per_gpu=32), pipeline_size=2, virtual_size=2
    )
    assert len(batch.microbatches) == 4
