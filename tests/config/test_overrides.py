"""Overrides, their types and ranges, the messages for wrong ones,
and the way through a file and back.
"""

import dataclasses
import shlex

import pytest

from megatron_stare.config import (
    Config,
    DataConfig,
    EvaluationSetConfig,
    LossConfig,
    UserError,
    differences,
    dump,
    load,
    nearest,
    override,
)
from megatron_stare.config.aliases import ALIASES
from megatron_stare.config.run import settings
from megatron_stare.recipes import RECIPES, find_recipe


def refusal(*overrides):
    """The one line that these overrides are refused with."""
    with pytest.raises(UserError) as caught:
        override(Config(), overrides)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("policy.tensor_model_parallel_size=2", 2),
        ("optimizer.lr=3e-6", 3e-6),
        ("optimizer.lr=1", 1.0),
        ("loss.gate=false", False),
        ("loss.variant=C2", "C2"),
        ("run.dir=runs/a=b", "runs/a=b"),
        ("compare.seeds=[0,1,2]", [0, 1, 2]),
        ("compare.run=[grpo_ds,stare]", ["grpo_ds", "stare"]),
        (
            "evaluation.eval_data={aime: a.parquet, gsm: b.jsonl}",
            {"aime": "a.parquet", "gsm": "b.jsonl"},
        ),
        ("evaluation.eval_data.aime24=a.parquet", {"aime24": "a.parquet"}),
        ("evaluation.per_set.a={n_samples: 3}", {"a": EvaluationSetConfig(n_samples=3)}),
        (
            "compare.arms.mine=[loss.name=stare,loss.alpha=0.05]",
            {"mine": ["loss.name=stare", "loss.alpha=0.05"]},
        ),
    ],
)
def test_override_sets_one_field_with_its_type(item, expected):
    section, name = item.split("=")[0].split(".")[:2]
    start = override(Config(), ["evaluation.eval_data.a=a.parquet"] * ("per_set" in item))
    changed = override(start, [item])
    value = getattr(getattr(changed, section), name)
    assert value == expected
    assert type(value) is type(expected)
    assert {
        key.rsplit(".", key.count(".") - 1)[0] for key, _, _ in differences(start, changed)
    } == {f"{section}.{name}"}


def test_overrides_apply_in_order_and_leave_the_original():
    start = Config()
    changed = override(start, ["optimizer.lr=1", "loss.name=dapo", "optimizer.lr=2"])
    assert (changed.optimizer.lr, changed.loss.name) == (2.0, "dapo")
    assert start == Config()
    assert override(start, []) == start
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.loss.name = "grpo"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        ("policy.tensor_model_parallel_sizes=2", "policy.tensor_model_parallel_size"),
        ("tensor_model_parallel_size=2", "policy.tensor_model_parallel_size"),
        ("optimizer.eps_clip=0.2", "loss.eps_clip"),
        ("optimiser.lr=1", "optimizer.lr"),
        ("loss.top_p=0.1", "loss.top_p_ratio"),
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("optimizer.learnign_rate=1", "optimizer.lr"),
        ("train.batch_size=8", "rollout.rollout_batch_size"),
        ("actor_rollout_ref.actor.optim.lr=1", "optimizer.lr"),
        ("algorithm.kl_coef=1", "loss.kl_loss_coef"),
        ("rollout.temperature=1", "rollout.rollout_temperature"),
        ("max_tokens=8", "rollout.rollout_max_response_len"),
        ("num_generations=8", "rollout.n_samples_per_prompt"),
        ("actor.clip_range=0.1", "loss.eps_clip"),
        ("optimizer.warmup_ratio=0.1", "optimizer.lr_warmup_iters"),
        ("actor.entropy_coeff=0.001", "loss.name"),
        ("policy.lora_rank=8", "adapters.rank"),
        ("rollout.gpu_memory_utilization=0.5", "sglang.server_args"),
        ("trainer.rollout_data_dir=dump", "run.record"),
        ("save_total_limit=3", "run.keep_last"),
        ("metric_for_best_model=eval_reward", "run.keep_best"),
        ("loss.entropy_target=1", "loss.target_entropy"),
    ],
)
def test_an_unknown_key_names_the_nearest(item, wanted):
    message = refusal(item)
    assert repr(item.split("=")[0]) in message
    assert f"did you mean {wanted!r}?" in message


@pytest.mark.parametrize("key", ["lam", "nnodes", "algorithm.use_kl_in_reward"])
def test_an_unknown_key_without_a_similar_one_gets_no_hint(key):
    assert refusal(f"{key}=1").endswith(
        f"unknown key {key!r}; docs/configuration.md lists all settings"
    )


@pytest.mark.parametrize("word", ["evaluation.per_set.a.nsamples=4", "evaluation.per_set.a={k: 4}"])
def test_an_unknown_key_of_an_evaluation_set_lists_its_settings(word):
    message = refusal("evaluation.eval_data.a=a.parquet", word)
    assert "unknown key 'evaluation.per_set.a." in message and "n_samples, temperature," in message


def test_an_unknown_key_of_a_known_section_lists_its_settings():
    message = refusal("optimizer.foo=1")
    assert "did you mean" not in message and "(optimizer has: lr, min_lr, " in message


def test_every_alias_names_a_setting():
    assert set(ALIASES.values()) <= settings().keys()
    assert not ALIASES.keys() & {key for key in settings() if "." not in key}


@pytest.mark.parametrize(
    "item",
    [
        "policy.tensor_model_parallel_size=two",
        "train.num_rollout=2.5",
        "optimizer.lr=fast",
        "optimizer.lr=null",
        "loss.gate=maybe",
        "loss.name=[a,b]",
        "compare.seeds=[a]",
        "compare.seeds=3",
        "loss.name=[a",
        "run.dir=${nowhere}",
        "run.dir=???",
        "evaluation.eval_data.a.b=x.jsonl",
        "evaluation.eval_data.a/b=x.jsonl",
        "compare.arms.a/b=[]",
        "evaluation.per_set.a.top_p=0",
        "evaluation.per_set.a=4",
        "run.seed=-1",
        "run.dir=null",
        "run.dir=~/runs",
        "run.dir=",
        "compare.seeds=[-1]",
        "train.num_rollout=true",
        "train.num_rollout=",
        "scoring.rewards={math: much}",
    ],
)
def test_an_ill_typed_value_names_its_field(item):
    assert item.split("=")[0] in refusal(item)


@pytest.mark.parametrize(
    "item",
    [
        "policy.dtype=fp8",
        "policy.head=tiled",
        "loss.variant=O2",
        "loss.scope=batch",
        "loss.aggregation=mean",
        "optimizer.lr_decay_style=step",
        "data.on_bad_row=ignore",
        "policy.tensor_model_parallel_size=0",
        "policy.max_tokens_per_gpu=0",
        "optimizer.lr=-1e-6",
        "optimizer.lr=nan",
        "optimizer.lr=inf",
        "optimizer.clip_grad=-1",
        "optimizer.adam_beta1=1",
        "rollout.rollout_temperature=0",
        "rollout.rollout_top_p=0",
        "rollout.rollout_top_p=1.01",
        "rollout.n_samples_per_prompt=0",
        "rollout.rollout_max_response_len=0",
        "data.rollout_max_prompt_len=0",
        "loss.eps_clip=-0.1",
        "loss.eps_clip_c=0.5",
        "loss.eps_clip_c=-3",
        "loss.top_p_ratio=1.1",
        "loss.reweight_w=0.9",
        "loss.reweight_m=1.1",
        "loss.m_min=-0.1",
        "train.num_rollout=0",
        "cold_start.steps=-1",
    ],
)
def test_a_value_out_of_range_names_its_field(item):
    assert item.split("=")[0] in refusal(item)


@pytest.mark.parametrize(
    "item",
    [
        "loss.eps_clip_c=0",
        "loss.eps_clip=0",
        "loss.top_p_ratio=0",
        "loss.top_p_ratio=1",
        "rollout.rollout_top_p=1",
        "loss.reweight_w=1",
        "loss.reweight_m=0",
        "optimizer.lr=0",
        "rollout.over_sampling_batch_size=0",
    ],
)
def test_the_ends_of_the_ranges_are_allowed(item):
    override(Config(), [item])


def test_an_override_without_a_value_says_how_to_write_one():
    assert "section.field=value" in refusal("loss.name")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_and_comes_back_from_its_file(name, tmp_path):
    config = find_recipe(name)
    assert override(config, []) == config, "a recipe outside its own ranges"
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("name", RECIPES)
def test_every_arm_of_every_recipe_applies(name):
    config = find_recipe(name)
    for overrides in config.compare.arms.values():
        applied = list(differences(config, override(config, overrides)))
        assert bool(applied) == bool(overrides)
    assert set(config.compare.run) <= config.compare.arms.keys()


def test_a_changed_config_comes_back_from_its_file(tmp_path):
    config = override(
        Config(),
        [
            "evaluation.eval_data.a b=x.jsonl",
            "run.dir='a: b # c'",
            "optimizer.lr=1.2345678901234567e-7",
            "compare.seeds=[3]",
        ],
    )
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


def test_a_shorter_file_takes_defaults(tmp_path):
    (tmp_path / "config.yaml").write_text("loss:\n  name: grpo\n")
    assert load(tmp_path / "config.yaml") == override(Config(), ["loss.name=grpo"])


@pytest.mark.parametrize(
    "content",
    [
        b"loss:\n  nmae: grpo\n",
        b"loss:\n  eps_clip: wide\n",
        b"loss:\n  eps_clip: 7\n",
        b"loss: [",
        b"- 1\n",
        b"\xff\xfe",
        b"run:\n  dir: ${nowhere}\n",
        b"loss: {name: a}\nloss: {name: b}\n",
        b"loss: 3\n",
        b"text",
        b"\x00",
    ],
)
def test_a_bad_file_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(tmp_path / "config.yaml")
    assert "\n" not in str(caught.value)


def test_a_broken_file_names_the_line(tmp_path):
    (tmp_path / "own.yaml").write_text("loss:\n  name: grpo\n  gate: [\n")
    with pytest.raises(UserError, match=r"own.yaml, line 4: expected the node content"):
        load(tmp_path / "own.yaml")
    (tmp_path / "own.yaml").write_text("policy: {tuning.fp8_recipe: mxfp8}\n")
    nested = "key 'tuning.fp8_recipe' has a dot; in a file write `policy: {tuning: {fp8_recipe: "
    with pytest.raises(UserError, match=nested):
        load(tmp_path / "own.yaml")
    (tmp_path / "own.yaml").write_text("loss:\n  nmae: grpo\n")
    with pytest.raises(
        UserError, match=r"own.yaml, line 2: unknown key 'loss.nmae'; did you mean 'loss.n"
    ):
        load(tmp_path / "own.yaml")


TEXTS = ["1e-6", "1_000", "007", "2024-01-01", "null", "yes", "~", "a: b", "1:30", ".5", "", "\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_look_like_other_types_survive_the_file(text, tmp_path):
    config = Config(data=DataConfig(system_prompt=text), loss=LossConfig(settings={"x": text}))
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("text", ["007", "after #### it", "step: by step", "*.a", "yes", "a\tb"])
def test_an_override_takes_a_text_as_it_is(text):
    """YAML would read a number, a comment, a mapping, an alias or a boolean."""
    assert override(Config(), [f"run.dir={text}"]).run.dir == text
    held = override(Config(), [f"evaluation.eval_data.a={text}"])
    assert held.evaluation.eval_data == {"a": text}


@pytest.mark.parametrize("text", ["[0-9]", "[0-9]+", "{a}", '"a" or "b"'])
def test_a_text_that_could_be_a_list_or_quoted_names_the_quotes(text):
    message = refusal(f"tools.answer_pattern={text}")
    (word,) = shlex.split(message.partition("itself write ")[2])
    config = override(Config(), ["tools.environment=calculator", word])
    assert config.tools.answer_pattern == text


@pytest.mark.parametrize("key", ["[abc", "[abc]", "{abc: 1}", "'abc", "[*abc]", "${abc"])
def test_a_refused_key_of_the_servers_is_not_shown(key, tmp_path):
    assert "abc" not in refusal(f"sglang.api_key={key}")
    (tmp_path / "own.yaml").write_text("sglang: {api_key: [abc]}")
    with pytest.raises(UserError, match=r"sglang.api_key=\*\*\* is not of type str"):
        load(tmp_path / "own.yaml")


def test_a_key_of_the_servers_in_an_arm_is_refused_and_not_shown():
    message = refusal("compare.arms.a=[loss.name=grpo,sglang.api_key=abc]")
    assert "compare.arms.a sets sglang.api_key" in message and "abc" not in message


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.yaml"):
        load(tmp_path / "nothing.yaml")


def test_an_unknown_recipe_lists_the_valid_ones_and_the_nearest():
    with pytest.raises(UserError, match="did you mean 'quickstart'") as caught:
        find_recipe("quickstrat")
    assert f"`recipes` lists all {len(RECIPES)}" in str(caught.value)


def test_nearest_lists_the_names_if_none_is_similar():
    assert nearest("zzzz", ["alpha", "beta"]) == " (valid: alpha, beta)"


def test_differences_gives_both_values():
    changed = override(Config(), ["loss.name=sft", "evaluation.eval_data.a=b"])
    found = [item for item in differences(Config(), changed) if item[0] != "evaluation.eval_data"]
    assert found == [("evaluation.eval_data.a", None, "b"), ("loss.name", "stare", "sft")]


def test_settings_of_one_evaluation_set(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("evaluation: {eval_data: {a: x}, per_set: {a: {temperature: 0, top_k: 0}}}\n")
    assert load(file).evaluation.per_set["a"] == EvaluationSetConfig(temperature=0.0, top_k=0)
    changed = override(load(file), ["evaluation.per_set.a.top_k=4"])
    assert changed.evaluation.per_set["a"] == EvaluationSetConfig(temperature=0.0, top_k=4)
    dump(changed, file)
    assert load(file) == changed
    file.write_text("evaluation: {eval_data: {held: x}, per_set: {held: {top_p: 0.0}}}\n")
    with pytest.raises(UserError, match=r"evaluation.per_set.held.top_p=0.0 is out of range"):
        load(file)
