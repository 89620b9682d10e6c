"""Rules between settings: some exclude or need one another, others are read only with another.

A condition is a text: `key` for any value but the default, `key=value` or `key=one|other`; a list
fulfils it by any of its items. A key may also be a property, e.g. loss.reads_reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_stare.config.errors import UserError
from megatron_stare.config.run import Config, lookup, settings
from megatron_stare.config.section import written
from megatron_stare.config.task import PER_SOURCE
from megatron_stare.config.training import AdaptersConfig, LossConfig

SECRETS = ("sglang.api_key",)  # in no file and no message
PROJECTIONS = AdaptersConfig().targets.split(",")
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act")
_SERVER = "http://host:port"
ADDRESSES = {
    "sglang.urls": _SERVER,
    "sglang.router_url": _SERVER,
    "sglang.reference_urls": _SERVER,
    "sglang.relays": _SERVER,
    "sandbox.url": _SERVER,
    "judge.urls": f"{_SERVER}/v1",
}
_REFERENCE = "whose reference stays as it is"

# Two conditions that exclude one another, and why; or one that needs another, and a remark.
RELATIONS = {
    "loss.scope excludes policy.context_parallel_size": "which splits the sequences",
    "mismatch.old_policy=rollout excludes mismatch.correction": (
        "which would correct for the same difference twice"
    ),
    "policy.shared_prompts excludes policy.context_parallel_size": "which splits the prompts",
    "policy.shared_prompts excludes policy.packed_sequences": "which pads every prompt",
    "policy.ref_update_interval excludes loss.distillation_coef": _REFERENCE,
    "policy.ref_update_interval excludes adapters.rank": _REFERENCE,
    "policy.ref_update_interval excludes sglang.reference_urls": _REFERENCE,
    "loss.distillation_top_k excludes sglang.reference_urls": (
        "which do not give the teacher's whole distribution"
    ),
    "rollout.rollout_temperature excludes sglang.reference_urls": (
        "which give log-probs at temperature 1"
    ),
    "policy.fp8 excludes adapters.rank": "",
    "policy.weight_quantization excludes adapters.rank": "",
    "policy.weight_quantization needs policy.dtype=bf16": (
        "its weights have fp32 copies, which keep what rounding removes"
    ),
    "adapters.apart=true excludes rollout.cache_over_versions": "",
    "adapters.apart=true excludes sglang.router_url": "",
    "adapters.apart=true excludes sglang.weights": "",
    "rollout.long_tail excludes rollout.asynchrony": "with which no step waits for the long tail",
    "rollout.cache_over_versions needs rollout.engine=sglang": "its servers have the caches",
    "rollout.cache_over_versions needs rollout.asynchrony=fully_async": (
        "only there do new weights find requests in flight"
    ),
    "rollout.cache_over_versions excludes sglang.router_url": (
        "by which the trainer does not reach the servers to pause them"
    ),
    "rollout.cache_over_versions excludes sglang.sync_method=delta": (
        "by which the trainer does not reach the servers to pause them"
    ),
    "sglang.colocated excludes sglang.sync_method=broadcast": (
        "which needs separate GPUs for trainer and servers"
    ),
    "sglang.colocated excludes rollout.asynchrony": "which generates while it trains",
    "sglang.weights needs policy.dtype=bf16": "servers keep all other weights in bf16",
    "sglang.sync_method=delta needs sglang.relays": (
        "start one next to the servers (python -m megatron_stare relay DIRECTORY), and name it: "
        "'sglang.relays=[http://host:31000]'"
    ),
    "sglang.speculation excludes sglang.deterministic": "which promises the tokens of the seeds",
    "sglang.speculation excludes policy.routing_replay=rollout": (
        "whose expert choices these servers do not return"
    ),
    "scoring.names=per_source needs scoring.per_source": (
        "give the reward of each data set: 'scoring.per_source={name: math, other: code}'"
    ),
    "scoring.names=episode needs agents.active=true": "it is the reward that an agent returns",
    "agents.function excludes agents.command": "which is another agent",
    "agents.function excludes tools.environment": "as an agent runs its own tools",
    "agents.command excludes tools.environment": "as an agent runs its own tools",
    "agents.function excludes policy.routing_replay=rollout": "which episodes of agents lack",
    "agents.command excludes policy.routing_replay=rollout": "which episodes of agents lack",
    "data.prompt_data excludes data.sources": "which are used instead",
    "sandbox.url excludes sandbox.stateful": "as such a server keeps no state between calls",
}


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


# A condition without which nothing reads these settings, or any setting of these sections.
READERS = {
    "rollout.resampling.method=aepo": _keys(
        "rollout.resampling",
        "target_entropy high_temperature low_temperature prompt_share max_rollouts",
    ),
    "rollout.resampling.method=uec_rl": _keys(
        "rollout.resampling",
        "temperature samples min_resampled_advantage replay_interval replay_batches "
        "replay_advantage replay_negative",
    ),
    "rollout.resampling.method": ("rollout.resampling.min_advantage",),
    "data.pass_rates": ("data.min_pass_rate", "data.max_pass_rate"),
    "adapters.rank": _keys("adapters", "alpha targets experts start merge"),
    "optimizer.lr_decay_style": ("optimizer.min_lr",),
    "policy.recompute_granularity=selective": ("policy.recompute_modules",),
    "loss.kl_loss_coef": ("loss.kl_loss_type", "policy.ref_update_interval"),
    "loss.distillation_coef": ("loss.distillation_top_k", "loss.reward_coef"),
    "loss.reads_reference=true": ("policy.ref_hf_checkpoint", "sglang.reference_urls"),
    "mismatch.correction": _keys("mismatch", "lower upper normalize rejected accepted"),
    "mismatch.alarm": ("mismatch.on_alarm",),
    "scoring.extraction=tag|any": ("scoring.answer_tag",),
    "scoring.overlong_buffer_len": ("scoring.overlong_penalty_factor",),
    "scoring.names=per_source": ("scoring.per_source",),
    "scoring.names=format": ("scoring.format_pattern",),
    "scoring.names=language": ("scoring.language",),
    "scoring.names=code": _keys("scoring", "code_seconds code_output_bytes code_partial_credit"),
    "scoring.names=remote": _keys(
        "scoring", "remote_url remote_timeout remote_attempts remote_concurrency"
    ),
    "scoring.names=judge": ("judge",),
    "tools.environment": ("tools",),
    "cold_start.runs=true": ("cold_start",),
    "agents.active=true": ("agents",),
    "rollout.engine=sglang": ("sglang.urls", "sglang.router_url"),
    "sglang.sync_method=delta": ("sglang.relays", "sglang.full_sync_interval"),
    "sglang.sync_method=disk": ("sglang.sync_directory",),
    "sglang.speculation": ("sglang.draft_tokens",),
}

# Conditions on properties, in the settings that a user writes.
_WORDS = {
    "loss.reads_reference=true": "loss.kl_loss_coef or loss.distillation_coef",
    "cold_start.runs=true": "both cold_start.data and cold_start.steps",
    "agents.active=true": "agents.function or agents.command",
    "adapters.apart=true": "adapters.merge=false",
}


def check(config: Config) -> None:
    """UserError, naming settings, values and remedy, for settings that contradict one another or
    that nothing reads.
    """
    rules = (_related, _ranges, _texts, _addresses, _rollouts, _keep_best, _servers, _judge, _idle)
    for rule in rules:
        for fault in rule(config):
            raise UserError(fault)


def holds(config: Config, condition: str) -> bool:
    """Whether a config fulfils a condition."""
    key, valued, wanted = condition.partition("=")
    value = lookup(config, key)
    if not valued:
        return bool(value != settings()[key].default)
    items = value if isinstance(value, list) else [value]
    return any(written(item) in wanted.split("|") for item in items)


def unread(config: Config) -> dict[str, list[str]]:
    """The settings that differ from their defaults and that nothing in a run reads, by the
    condition that they lack. Arms of a comparison are runs: what they share may be for some of
    them, and nothing of it is named.
    """
    found = {}
    for condition, names in () if config.compare.arms else READERS.items():
        if not holds(config, condition):
            keys = [key for key in settings() if key in names or key.partition(".")[0] in names]
            found[condition] = [key for key in keys if holds(config, key)]
    return {condition: keys for condition, keys in found.items() if keys}


def _said(config: Config, condition: str) -> str:
    """The condition that a config fulfils, as a user has set it."""
    key = condition.partition("=")[0]
    return _in_words(condition) if "=" in condition else f"{key}={written(lookup(config, key))}"


def _in_words(condition: str) -> str:
    """A condition as a user fulfils it, by the first of its values."""
    first = condition.partition("|")[0].replace("scoring.names", "scoring.reward")
    return _WORDS.get(condition, first)


def _reset(condition: str) -> str:
    """The override by which a condition no longer holds."""
    key = _in_words(condition).partition("=")[0]
    return f"{key}={written(settings()[key].default)}"


def _related(config: Config) -> Iterator[str]:
    for relation, why in RELATIONS.items():
        one, verb, other = relation.split(" ")
        if not holds(config, one) or holds(config, other) != (verb == "excludes"):
            continue
        given = _said(config, one)
        if verb == "needs":
            key, valued, _ = other.partition("=")
            found = f", not {written(lookup(config, key))}" if valued and key in settings() else ""
            yield f"{given} needs {_in_words(other)}{found}; {why}"
        else:
            because = f", {why}" if why else ""
            yield (
                f"{given} is not possible with {_said(config, other)}{because}; set {_reset(one)} "
                f"or {_reset(other)}"
            )


def _idle(config: Config) -> Iterator[str]:
    for condition, keys in unread(config).items():
        given = ", ".join(_said(config, key) for key in keys)
        yield (
            f"{given} {'have' if keys[1:] else 'has'} no effect without {_in_words(condition)}; "
            f"set that, or return to {', '.join(map(_reset, keys))}"
        )


def _ranges(config: Config) -> Iterator[str]:
    """Ranges of numbers that depend on others, or have a gap."""
    optimizer, data, dual = config.optimizer, config.data, config.loss.eps_clip_c
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"optimizer.min_lr={optimizer.min_lr:g}, the end of the decay, is above "
            f"optimizer.lr={optimizer.lr:g}; lower it"
        )
    if dual is not None and 0 < dual <= 1:
        yield f"loss.eps_clip_c={dual!r} is out of range; it must be 0 (off) or above 1"
    yield from _adapted_weights(config.loss)
    least, most = data.min_pass_rate, data.max_pass_rate
    if data.pass_rates and (least > most or (least, most) == (0, 1)):
        yield (
            f"data.pass_rates keeps prompts from data.min_pass_rate={least:g} to "
            f"max_pass_rate={most:g}, which is {'every one' if least < most else 'none'}; set "
            "data.min_pass_rate=0.1 and data.max_pass_rate=0.9, for example"
        )


def _adapted_weights(loss: LossConfig) -> Iterator[str]:
    """STARE's weights where they start outside of the bounds within which they adapt."""
    if loss.adaptive and loss.reweight_w > loss.w_max:
        yield (
            f"loss.reweight_w={loss.reweight_w:g}, at which W starts, is above "
            f"loss.w_max={loss.w_max:g}; raise the bound, or lower the start"
        )
    if loss.adaptive and loss.reweight_m < loss.m_min:
        yield (
            f"loss.reweight_m={loss.reweight_m:g}, at which M starts, is below "
            f"loss.m_min={loss.m_min:g}; lower the bound, or raise the start"
        )


def _texts(config: Config) -> Iterator[str]:
    """Names and texts within a setting."""
    evaluation = config.evaluation
    parts = {"policy.recompute_modules": RECOMPUTED, "adapters.targets": PROJECTIONS}
    for key, known in parts.items():
        for name in map(str.strip, lookup(config, key).split(",")):
            if name not in known:
                yield f"{key} has {name!r}, which is none of {', '.join(known)}"
    sets = ", ".join(evaluation.eval_data) or "none"
    for name in evaluation.per_set:
        if name not in evaluation.eval_data:
            yield (
                f"evaluation.per_set has {name!r}, which is not a set of evaluation.eval_data "
                f"({sets})"
            )
    for key in ("evaluation.eval_data", "compare.arms"):
        for name in lookup(config, key):
            if not name or "/" in name:
                yield f"{key}.{name}: the name is one of files too; choose one without a slash"
    for arm, items in config.compare.arms.items():
        for key in SECRETS:
            if any(item.partition("=")[0] == key for item in items):
                yield (
                    f"compare.arms.{arm} sets {key}, which would stand in config.yaml; set {key} "
                    "for all arms"
                )
    if not config.run.dir:
        yield "run.dir is empty; name a directory for what the run writes"
    for key, setting in settings().items():
        found = lookup(config, key)
        if setting.kind is str and found.startswith("~/"):
            yield f"{key}={found}: nothing replaces ~ here; write the whole path, or $HOME"
    if not all(word.strip() for word in evaluation.reflection_words):
        yield "evaluation.reflection_words has an empty word; leave it out"
    if "" in config.rollout.stop:
        yield "rollout.stop has an empty text; leave it out"
    if PER_SOURCE in config.scoring.per_source.values():
        yield "scoring.per_source has itself as a reward; name another one"


def _addresses(config: Config) -> Iterator[str]:
    for key, form in ADDRESSES.items():
        given = lookup(config, key)
        for url in filter(None, [given] if isinstance(given, str) else given):
            if not url.startswith(("http://", "https://")):
                yield f"{key} has {url!r}, which is not an address; write {form}"


def _rollouts(config: Config) -> Iterator[str]:
    """The age of rollouts, and those that are stopped when the batch is full."""
    rollout, mismatch, staleness = config.rollout, config.mismatch, config.rollout.staleness_limit
    if rollout.asynchrony != "on_policy" and staleness < 1:
        yield (
            f"rollout.asynchrony={rollout.asynchrony} trains on rollouts of older weights, which "
            f"rollout.max_staleness={staleness} drops; set it to 1 or more"
        )
    size, first = rollout.rollout_batch_size, rollout.over_sampling_batch_size
    chosen = f"rollout.long_tail={rollout.long_tail}"
    if rollout.stops_the_tail and first <= size:
        yield (
            f"{chosen} needs rollout.over_sampling_batch_size={first} above "
            f"rollout_batch_size={size}; raise it"
        )
    if rollout.long_tail == "continue" and staleness < 1:
        yield (
            f"{chosen} continues rollouts that older weights sampled, which "
            "rollout.max_staleness=0 drops; set max_staleness=1, or long_tail=restart or gather"
        )
    if rollout.long_tail == "gather" and staleness:
        yield (
            f"{chosen} samples every prompt by the weights that train on it, and "
            f"rollout.max_staleness={staleness} allows older ones; set it to 0"
        )
    kept = rollout.cache_over_versions == "kept"
    if kept and mismatch.old_policy != "trainer" and mismatch.correction == "none":
        yield (
            "rollout.cache_over_versions=kept samples tokens that no single version of the weights "
            f"gives, and mismatch.old_policy={mismatch.old_policy} takes their log-probs for those "
            "of an old policy; set mismatch.correction=token_tis or mismatch.old_policy=trainer"
        )


def _keep_best(config: Config) -> Iterator[str]:
    """The steps and the metric of the best checkpoint."""
    wanted, evaluation = config.run.keep_best, config.evaluation
    if not wanted:
        return
    numbers = [
        f"eval/{n}/{at_k}" for n in evaluation.eval_data for at_k in ("avg_at_k", "pass_at_k")
    ]
    if wanted not in numbers:
        yield (
            f"run.keep_best={wanted!r} is not one of {', '.join(numbers) or 'the numbers'} of "
            "evaluation.eval_data; set it to one of these, or leave it empty"
        )
    between, saved = evaluation.eval_interval, config.run.save_interval
    if not between or not saved or between % saved:
        yield (
            f"run.keep_best={wanted} needs steps that are evaluated, and each of them saved, which "
            f"evaluation.eval_interval={between} with run.save_interval={saved} does not give; "
            f"set run.save_interval={between or 50}{'' if between else ' and eval_interval=50'}"
        )


def _servers(config: Config) -> Iterator[str]:
    """FP8 weights of servers, and their arguments."""
    servers, mismatch = config.sglang, config.mismatch
    corrected = mismatch.correction != "none" or mismatch.old_policy == "rollout"
    rounded = config.policy.weight_quantization != "none"
    if servers.weights == "fp8" and not rounded and not corrected:
        yield (
            "sglang.weights=fp8 samples with rounded weights, and nothing corrects for it; set "
            "mismatch.correction=token_tis, or policy.weight_quantization=fp8 to train the rounded "
            "weights, or sglang.weights=fp8_uncorrected to go without"
        )
    if found := re.search(r"--speculative\S*", servers.server_args):
        yield (
            f"sglang.server_args has {found[0]}; set sglang.speculation, which keeps out what makes"
            " sampling inexact"
        )
    given = re.search(r"--max-running-requests[ =](\d+)", servers.server_args)
    if servers.speculation != "none" and given and int(given[1]) < servers.max_concurrency:
        yield (
            f"sglang.server_args has {given[0]}, fewer than sglang.max_concurrency="
            f"{servers.max_concurrency}; leave it out"
        )


def _judge(config: Config) -> Iterator[str]:
    judge, samples = config.judge, config.rollout.n_samples_per_prompt
    if "judge" not in config.scoring.names:
        return
    if bool(judge.urls) == bool(judge.checkpoint):
        yield (
            "scoring.reward=judge needs a language model; set either judge.urls, to servers that "
            "run, or judge.checkpoint, to start some"
        )
    if judge.kind == "pairwise" and samples < 2:
        yield (
            "judge.kind=pairwise compares responses to one prompt, and "
            f"rollout.n_samples_per_prompt={samples}; raise it"
        )
