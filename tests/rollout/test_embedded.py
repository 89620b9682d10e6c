"""The embedded engine against the trainer and against a naive sampler:
log-probs, determinism, stops, refusals.
"""

import concurrent.futures
import json
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_stare.config import Config, PolicyConfig, RolloutConfig, UserError
from megatron_stare.policy import topology
from megatron_stare.policy.actor import Actor
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.rollout.embedded import EmbeddedEngine
from megatron_stare.rollout.engine import Request, SamplingParams, generate
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint

DELTA_NETS = ["qwen3_5_text", "qwen3_5_moe_text"]
FAMILIES = ["qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "llama3_rope", *DELTA_NETS]


# Of log-probs in fp32. The outputs of a gated delta net are normalised per head, which enlarges the
# rounding of small ones: transformers' own differ as much from float64.
TOLERANCE = dict.fromkeys(DELTA_NETS, 5e-4)


VOCABULARY = 257


CONTEXT = 96


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> directory with weights and a byte tokenizer."""
    root = tmp_path_factory.mktemp("engines")
    found = {}
    for seed, family in enumerate(FAMILIES):
        config = tiny_config(family, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
        found[family] = write_checkpoint(root / family, config, seed)
        byte_tokenizer().save_pretrained(found[family])
    return found


@pytest.fixture(scope="module")
def alone():
    yield topology.start(PolicyConfig())
    topology.stop()


def engine_of(directory, batch_size=64):
    """An engine on the directory's weights, streamed in by name."""
    engine = EmbeddedEngine(
        str(directory), byte_tokenizer(), batch_size, torch.float32, torch.device("cpu")
    )
    engine.load_weights(load_file(directory / "model.safetensors").items(), version=7)
    return engine


def requests(count=10, seed=3):
    """Prompts of many lengths; every one has its own seed tuple."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(
            tuple(torch.randint(1, VOCABULARY, (1 + 3 * n % 17,), generator=generator).tolist()),
            (seed, n),
        )
        for n in range(count)
    ]


PLAIN = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=40)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_the_trainer(family, temperature, checkpoints, alone):
    engine = EmbeddedEngine(
        str(checkpoints[family]), byte_tokenizer(), 4, torch.float32, torch.device("cpu")
    )
    asked, groups = requests(), []
    for packed in (True, False) if temperature < 1 else (True,):
        policy = PolicyConfig(
            hf_checkpoint=str(checkpoints[family]), max_tokens_per_gpu=200, packed_sequences=packed
        )
        config = Config(policy=policy, rollout=RolloutConfig(rollout_temperature=temperature))
        actor = Actor(config, alone, total_steps=1)
        if not groups:
            engine.load_weights(actor.weights(), version=0)
            rollouts = generate(engine, asked, SamplingParams(temperature, 1.0, 40))
            groups = [
                Group(Prompt(n, request.prompt_ids, ""), (rollout_with_advantage(rollout),))
                for n, (request, rollout) in enumerate(zip(asked, rollouts, strict=True))
            ]
        batch = actor.score(actor.pack(groups, 0))
        assert len(batch.microbatches) > 1
        count = sum(len(rollout.response_ids) for rollout in rollouts)
        assert batch.rollout_logprob_T.numel() == count > 100
        tolerance = TOLERANCE.get(family, 1e-5)
        torch.testing.assert_close(
            -batch.surprisal_T, batch.rollout_logprob_T, atol=tolerance, rtol=0
        )


def rollout_with_advantage(rollout):
    return Rollout(
        rollout.response_ids,
        rollout.logprobs,
        rollout.loss_mask,
        status=rollout.status,
        weight_version=rollout.weight_version,
        advantage=1.0,
    )


def assert_same(one, other, tolerance=1e-5):
    """The same tokens; log-probs up to the rounding of differently shaped products."""
    assert [rollout.response_ids.tolist() for rollout in one] == [
        rollout.response_ids.tolist() for rollout in other
    ]
    assert [rollout.status for rollout in one] == [rollout.status for rollout in other]
    for first, second in zip(one, other, strict=True):
        assert first.logprobs.tolist() == pytest.approx(second.logprobs.tolist(), abs=tolerance)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_5_text"])
def test_a_rollout_does_not_depend_on_its_neighbours(family, checkpoints):
    engine, asked = engine_of(checkpoints[family]), requests()
    together = generate(engine, asked, PLAIN)
    assert len({rollout.response_ids.tobytes() for rollout in together}) == len(asked)
    small, own = engine_of(checkpoints[family], batch_size=3), TOLERANCE.get(family, 1e-5)
    assert_same(together, generate(small, asked, PLAIN), own)
    assert_same(together[::-1], generate(engine, asked[::-1], PLAIN), own)
    alone = [generate(engine, [request], PLAIN)[0] for request in asked[:4]]
    assert_same(together[:4], alone, own)


def test_the_seed_decides(checkpoints):
    engine, prompt = engine_of(checkpoints["qwen2"]), (5, 6, 7)
    seeds = [(1, 2, 3), (1, 2, 4), (1, 2, 3)]
    first, second, third = generate(engine, [Request(prompt, seed) for seed in seeds], PLAIN)
    first_ids, second_ids, third_ids = (r.response_ids.tolist() for r in (first, second, third))
    assert first_ids == third_ids != second_ids


def test_a_longer_limit_only_continues(checkpoints):
    engine, asked = engine_of(checkpoints["qwen2"]), requests(4)
    short = generate(engine, asked, SamplingParams(1.0, 1.0, 5))
    for one, other in zip(short, generate(engine, asked, PLAIN), strict=True):
        assert other.response_ids[:5].tolist() == one.response_ids.tolist()


def test_a_rollout_has_its_tokens_log_probs_and_version(checkpoints):
    engine, asked = engine_of(checkpoints["qwen2"]), requests(3)
    for rollout in generate(engine, asked, SamplingParams(1.0, 1.0, 6)):
        assert rollout.weight_version == 7
        assert rollout.loss_mask.all() and len(rollout.loss_mask) == len(rollout.response_ids)
        assert rollout.text == byte_tokenizer().decode(
            rollout.response_ids, skip_special_tokens=True
        )
        assert rollout.reward is None
        assert rollout.advantage is None


def in_background(engine, asked, params):
    """The engine's generate in a thread, so that this one can interfere."""
    return concurrent.futures.ThreadPoolExecutor(1).submit(generate, engine, asked, params)


@pytest.mark.parametrize("everything", [False, True])
def test_aborted_requests_keep_their_tokens(checkpoints, everything):
    engine, asked = engine_of(checkpoints["qwen2"]), requests(6)
    whole = generate(engine, asked, PLAIN)
    with engine._weights:  # no token is decoded while another thread holds the weights
        future = in_background(engine, asked, PLAIN)
        while not engine._live:
            time.sleep(0.01)
        engine.abort(None if everything else asked[::2])
    for number, (rollout, full) in enumerate(zip(future.result(timeout=60), whole, strict=True)):
        if everything or number % 2 == 0:
            assert rollout.status == "aborted" and len(rollout.response_ids) < len(
                full.response_ids
            )
        else:
            assert rollout.status == full.status
        known = full.response_ids[: len(rollout.response_ids)]
        assert rollout.response_ids.tolist() == known.tolist()
    assert_same(whole, generate(engine, asked, PLAIN))


def test_no_requests_give_no_rollouts(checkpoints):
    assert generate(engine_of(checkpoints["qwen2"]), [], PLAIN) == []


COLD = {
    "cold": SamplingParams(1e-4, 1.0, 12),
    "greedy": SamplingParams(0.0, 1.0, 12),
    "one candidate": SamplingParams(1.7, 1.0, 12, top_k=1),
}


@pytest.mark.parametrize("params", COLD.values(), ids=COLD)
def test_a_cold_engine_follows_the_argmax_of_transformers(checkpoints, params):
    model = AutoModelForCausalLM.from_config(
        tiny_config("qwen3", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT),
        dtype=torch.float32,
    ).eval()
    model.load_state_dict(load_file(checkpoints["qwen3"] / "model.safetensors"))
    asked = requests(4)
    rollouts = generate(engine_of(checkpoints["qwen3"]), asked, params)
    for request, rollout in zip(asked, rollouts, strict=True):
        ids = list(request.prompt_ids)
        for token, logprob in zip(rollout.response_ids, rollout.logprobs, strict=True):
            with torch.no_grad():
                logits_V = model(torch.tensor([ids])).logits[0, -1]
            assert token == int(logits_V.argmax())
            if params.greedy:
                assert logprob == pytest.approx(float(logits_V.log_softmax(-1).max()), abs=1e-4)
            ids.append(token)


def with_stops(directory, target, generation, config_stops):
    """A copy of a checkpoint whose config and generation config name these end tokens."""
    shutil.copytree(directory, target)
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(content | {"eos_token_id": config_stops}))
    if generation is None:
        (target / "generation_config.json").unlink(missing_ok=True)
    else:
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return target


@pytest.mark.parametrize(
    ("generation", "config_stops", "expected"),
    [(None, 3, {0, 3}), ([4, 5], 3, {0, 3, 4, 5}), (6, None, {0, 6}), (None, [8, 9], {0, 8, 9})],
)
def test_every_named_end_token_stops(generation, config_stops, expected, checkpoints, tmp_path):
    directory = with_stops(checkpoints["qwen2"], tmp_path / "model", generation, config_stops)
    assert engine_of(directory).stop_ids == expected


def test_a_response_ends_with_its_first_stop_token(checkpoints, tmp_path):
    stops = set(range(100, 120))
    directory = with_stops(checkpoints["qwen2"], tmp_path / "model", sorted(stops), None)
    free, stopping = engine_of(checkpoints["qwen2"]), engine_of(directory)
    asked = requests(24)
    ended = 0
    unhindered = generate(free, asked, PLAIN)
    for rollout, longer in zip(generate(stopping, asked, PLAIN), unhindered, strict=True):
        ids = longer.response_ids.tolist()
        first = next((n for n, token in enumerate(ids) if token in stops | {0}), None)
        if first is None:
            assert (rollout.status, rollout.response_ids.tolist()) == ("truncated", ids)
            assert len(ids) == PLAIN.max_new_tokens
        else:
            assert rollout.status == "completed"
            assert rollout.response_ids.tolist() == ids[: first + 1]
            ended += 1
    assert 5 < ended < 24


@pytest.mark.parametrize("stop", ["</a>", "\u7b54\u6848", "\U0001f642", "end\u3002"])
def test_a_text_of_several_bytes_a_character_ends_a_response(checkpoints, monkeypatch, stop):
    """The byte tokenizer takes three or four tokens for one of these characters."""
    engine, ids = engine_of(checkpoints["qwen2"]), byte_tokenizer().encode(f"abc{stop}def")
    tokens = iter(ids)

    def scripted(logits_BV, uniform_B, params):
        return torch.tensor([next(tokens)]), torch.zeros(1)

    monkeypatch.setattr("megatron_stare.rollout.embedded.next_tokens", scripted)
    params = SamplingParams(1.0, 1.0, len(ids), stop=(stop,))
    (rollout,) = generate(engine, requests(1), params)
    assert (rollout.text, rollout.status) == (f"abc{stop}", "completed")


def test_a_model_without_any_end_token_is_refused(checkpoints, tmp_path):
    directory = with_stops(checkpoints["qwen2"], tmp_path / "model", None, None)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="eos_token_id"):
        EmbeddedEngine(str(directory), tokenizer, 4, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ((5,) * (CONTEXT - 39), "max_position_embeddings"),
        ((5, VOCABULARY), str(VOCABULARY)),
        ((5, -1), "-1"),
        ((), "non-empty"),
    ],
)
def test_a_refused_prompt_names_the_reason(prompt, name, checkpoints):
    engine = engine_of(checkpoints["qwen2"])
    with pytest.raises(UserError, match=name) as caught:
        generate(engine, [*requests(2), Request(prompt, (0,))], PLAIN)
    assert "\n" not in str(caught.value)


def test_the_longest_prompt_that_fits_is_served(checkpoints):
    rollout = generate(
        engine_of(checkpoints["qwen2"]), [Request((5,) * (CONTEXT - 40), (0,))], PLAIN
    )[0]
    assert len(rollout.response_ids) == 40 or rollout.status == "completed"


@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied"])
def test_a_weight_stream_must_be_whole_and_known(family, checkpoints):
    engine = engine_of(checkpoints[family])
    weights = load_file(checkpoints[family] / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        engine.load_weights([pair for pair in weights.items() if pair[0] != "model.norm.weight"], 8)
    with pytest.raises(RuntimeError, match=r"other\.weight"):
        engine.load_weights([("other.weight", torch.ones(1))], 8)
    assert engine.version == 7


def test_new_weights_change_what_is_sampled(checkpoints):
    engine, asked = engine_of(checkpoints["qwen2"]), requests(3)
    before = generate(engine, asked, PLAIN)
    weights = load_file(checkpoints["qwen2"] / "model.safetensors")
    engine.load_weights([(name, -tensor) for name, tensor in weights.items()], 8)
    after = generate(engine, asked, PLAIN)
    assert [rollout.response_ids.tolist() for rollout in before] != [
        rollout.response_ids.tolist() for rollout in after
    ]
    engine.load_weights(weights.items(), 9)
    assert_same(before, generate(engine, asked, PLAIN))


def logprobs_of(checkpoint, scale, request, rollout):
    """The log-probs of each response token by transformers, with all weights times `scale`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
        logits = model(torch.tensor([[*request.prompt_ids, *rollout.response_ids]])).logits[0]
    before = torch.log_softmax(logits[len(request.prompt_ids) - 1 : -1], -1)
    return before.gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]


def test_every_token_has_the_version_of_its_weights(checkpoints, monkeypatch):
    """Every token's log-prob is that of the weights its version names,
    on all that stands before it.
    """
    engine, asked = engine_of(checkpoints["qwen2"]), requests(6)
    weights = load_file(checkpoints["qwen2"] / "model.safetensors")
    sampled = engine._sampled
    reached, loaded = ({8: threading.Event(), 16: threading.Event()} for _ in range(2))

    def pausing(live, *arguments):
        """After 8 and 16 tokens wait for the next weights, however slow this test's thread is."""
        for tokens, event in reached.items():
            if max(len(sequence.ids) for sequence in live) >= tokens and not event.is_set():
                event.set()
                assert loaded[tokens].wait(60)
        return sampled(live, *arguments)

    monkeypatch.setattr(engine, "_sampled", pausing)
    futures = engine.submit(asked, PLAIN)
    scales = {7: 1.0}
    for version in (8, 9):
        assert reached[8 * (version - 7)].wait(60)
        scales[version] = 1.0 - 0.02 * (version - 7)
        engine.load_weights(
            [(name, scales[version] * tensor) for name, tensor in weights.items()], version
        )
        loaded[8 * (version - 7)].set()
    rollouts = [future.result(timeout=60) for future in futures]
    assert max(len(set(rollout.versions)) for rollout in rollouts) == 3
    for request, rollout in zip(asked, rollouts, strict=True):
        assert (
            list(rollout.versions) == sorted(rollout.versions)
            and rollout.weight_version == rollout.versions[-1]
        )
        for version in set(rollout.versions):
            mine = torch.tensor([token == version for token in rollout.versions])
            expected = logprobs_of(checkpoints["qwen2"], scales[version], request, rollout)
            torch.testing.assert_close(
                torch.tensor(rollout.logprobs)[mine], expected[mine], atol=1e-5, rtol=0
            )
            if len(scales) > 1 and version != 7:
                other = logprobs_of(checkpoints["qwen2"], 1.0, request, rollout)
                assert (expected[mine] - other[mine]).abs().max() > 1e-4, (
                    "the check distinguishes versions"
                )


def test_a_continued_part_equals_an_uninterrupted_response(checkpoints):
    engine, asked = engine_of(checkpoints["qwen2"]), requests(6)
    whole = generate(engine, asked, PLAIN)
    parts = []
    for request, rollout in zip(asked, whole, strict=True):
        ids = rollout.response_ids[: len(rollout.response_ids) // 2]
        part = Rollout(
            ids, rollout.logprobs[: len(ids)], (1,) * len(ids), status="aborted", weight_version=5
        )
        parts.append(Request(request.prompt_ids, request.seed, part))
    continued = generate(engine, parts, PLAIN)
    assert_same(whole, continued)
    assert [rollout.text for rollout in whole] == [rollout.text for rollout in continued]
    for request, rollout in zip(parts, continued, strict=True):
        early = len(request.part.response_ids)
        late = len(rollout.response_ids) - early
        assert rollout.versions.tolist() == [5] * early + [7] * late
        assert rollout.loss_mask.all() and len(rollout.loss_mask) == len(rollout.response_ids)


def test_fp32_logits_are_not_rounded_by_a_bf16_engine(checkpoints):
    ids = torch.arange(1, 30)[None]
    for fp32_logits in (False, True):
        engine = EmbeddedEngine(
            *(str(checkpoints["qwen3"]), byte_tokenizer(), 4, torch.bfloat16, torch.device("cpu")),
            fp32_logits=fp32_logits,
        )
        engine.load_weights(load_file(checkpoints["qwen3"] / "model.safetensors").items(), 0)
        with torch.no_grad():
            found = engine.model(ids, output_hidden_states=True)
        last, weight = found.hidden_states[-1], engine.model.lm_head.weight.detach()
        assert last.dtype == torch.bfloat16
        exact = last.double() @ weight.double().t()
        error = float((found.logits.double() - exact).abs().max())
        assert (error < 1e-5) == fp32_logits, error


def test_policy_fp32_logits_reach_the_trainers_head(checkpoints, alone):
    scores, ended = [], {"status": "completed", "weight_version": 0}
    for fp32_logits in (False, True):
        policy = PolicyConfig(
            hf_checkpoint=str(checkpoints["qwen3"]),
            dtype="bf16",
            fp32_logits=fp32_logits,
            max_tokens_per_gpu=200,
        )
        actor = Actor(Config(policy=policy), alone, total_steps=1)
        groups = []
        for n in range(9):
            rollout = Rollout((5, n, 7), (-1.0,) * 3, (True,) * 3, **ended)
            groups.append(Group(Prompt(n, (n + 1,), ""), (rollout_with_advantage(rollout),)))
        scores.append(actor.score(actor.pack(groups, 0)).surprisal_T)
    difference = float((scores[0] - scores[1]).abs().max())
    assert 1e-4 < difference < 0.1, "nats"
