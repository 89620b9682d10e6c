"""The whole configuration of a run, and the rules that hold between its fields."""

from __future__ import annotations

import re

from pydantic import Field

from megatron_stare.config.data import DataConfig, EvaluationConfig
from megatron_stare.config.errors import UserError
from megatron_stare.config.loss import LossConfig, MismatchConfig
from megatron_stare.config.policy import (
    AdaptersConfig,
    ColdStartConfig,
    OptimizerConfig,
    PolicyConfig,
    TrainConfig,
)
from megatron_stare.config.rollout import AgentsConfig, RolloutConfig, ToolsConfig
from megatron_stare.config.run import AlarmsConfig, CompareConfig, DiagnosticsConfig, RunConfig
from megatron_stare.config.scoring import PER_SOURCE, JudgeConfig, ScoringConfig
from megatron_stare.config.section import section
from megatron_stare.config.servers import SandboxConfig, SGLangConfig

RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act")


@section
class Config:
    """One run: a section per stage, under the names that slime (rollouts), Megatron (parallelism,
    optimizer) and the STARE reference give to the same settings.
    """

    run: RunConfig = Field(default_factory=RunConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    adapters: AdaptersConfig = Field(default_factory=AdaptersConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    sglang: SGLangConfig = Field(default_factory=SGLangConfig)
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    agents: AgentsConfig = Field(default_factory=AgentsConfig)
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    diagnostics: DiagnosticsConfig = Field(default_factory=DiagnosticsConfig)
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig)
    cold_start: ColdStartConfig = Field(default_factory=ColdStartConfig)
    compare: CompareConfig = Field(default_factory=CompareConfig)

    @property
    def reference(self) -> str:
        """policy.ref_hf_checkpoint where the loss reads a reference model; else empty."""
        return self.policy.ref_hf_checkpoint if self.loss.reads_reference else ""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response that the limits allow."""
        return self.data.rollout_max_prompt_len + self.rollout.rollout_max_response_len


def check(config: Config) -> None:
    """UserError, naming field, value and remedy, for fields that contradict one another."""
    for rule in (
        _check_loss,
        _check_optimizer,
        _check_policy,
        _check_reference,
        _check_adapters,
        _check_adapters_apart,
        _check_asynchrony,
        _check_kept_caches,
        _check_data,
        _check_keep_best,
        _check_rewards,
        _check_servers,
        _check_served_weights,
        _check_speculation,
        _check_sandbox,
        _check_agents,
        _check_judge,
    ):
        rule(config)


def _check_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise UserError(
            f"optimizer.min_lr={optimizer.min_lr:g}, the end of the decay, is above "
            f"optimizer.lr={optimizer.lr:g}; lower it"
        )


def _check_loss(config: Config) -> None:
    loss, policy, mismatch = config.loss, config.policy, config.mismatch
    if loss.scope != "global" and policy.context_parallel_size > 1:
        raise UserError(
            f"loss.scope={loss.scope} selects inside whole sequences, which "
            f"policy.context_parallel_size={policy.context_parallel_size} splits; set "
            "loss.scope=global or context_parallel_size=1"
        )
    if loss.eps_clip_c is not None and 0 < loss.eps_clip_c <= 1:
        raise UserError(
            f"loss.eps_clip_c={loss.eps_clip_c!r} is out of range; it must be 0 (off) or above 1"
        )
    if mismatch.old_policy == "rollout" and mismatch.correction != "none":
        raise UserError(
            f"mismatch.correction={mismatch.correction} and mismatch.old_policy=rollout would "
            "correct for the same difference twice; reset one of them"
        )


def _check_policy(config: Config) -> None:
    policy = config.policy
    if policy.weight_quantization != "none" and policy.dtype != "bf16":
        raise UserError(
            f"policy.weight_quantization={policy.weight_quantization} needs policy.dtype=bf16, "
            f"whose fp32 copies keep what rounding removes, not {policy.dtype}"
        )
    if policy.shared_prompts and policy.context_parallel_size > 1:
        raise UserError(
            "policy.shared_prompts=true needs policy.context_parallel_size=1, not "
            f"{policy.context_parallel_size}; set one of them"
        )
    if policy.shared_prompts and not policy.packed_sequences:
        raise UserError(
            "policy.shared_prompts=true needs policy.packed_sequences=true; set one of them"
        )
    for name in policy.recompute_modules.split(","):
        if name.strip() not in RECOMPUTED:
            raise UserError(
                f"policy.recompute_modules has {name.strip()!r}, which is none of "
                f"{', '.join(RECOMPUTED)}"
            )


def _check_reference(config: Config) -> None:
    urls, temperature = config.sglang.reference_urls, config.rollout.rollout_temperature
    fixed = {
        "loss.distillation_coef": config.loss.distillation_coef,
        "adapters.rank": config.adapters.rank,
        "sglang.reference_urls": urls,
    }
    for key, value in fixed.items():
        if value and config.policy.ref_update_interval:
            raise UserError(
                f"policy.ref_update_interval={config.policy.ref_update_interval} is not possible "
                f"with {key}={value}, whose reference stays as it is; leave one of them out"
            )
    if urls and config.loss.distillation_top_k:
        raise UserError(
            f"loss.distillation_top_k={config.loss.distillation_top_k} needs the teacher's whole "
            "distribution, which servers do not give; set it to 0, or leave "
            "sglang.reference_urls out"
        )
    if urls and temperature != 1:
        raise UserError(
            "sglang.reference_urls needs rollout.rollout_temperature=1, at which servers give "
            f"log-probs, not {temperature:g}; leave it out, or set that"
        )


def _check_adapters(config: Config) -> None:
    adapters, policy = config.adapters, config.policy
    known = AdaptersConfig().target_names
    for name in sorted(adapters.target_names - known):
        raise UserError(
            f"adapters.targets has {name!r}, which is none of {AdaptersConfig().targets}"
        )
    refused = {"fp8": policy.fp8, "weight_quantization": policy.weight_quantization}
    for field, value in refused.items():
        if adapters.rank and value != "none":
            raise UserError(
                f"policy.{field}={value} is not supported with adapters.rank={adapters.rank}; set "
                f"policy.{field}=none"
            )


def _check_adapters_apart(config: Config) -> None:
    rollout, servers = config.rollout, config.sglang
    if not config.adapters.apart:
        return
    for name, value, plain in (
        ("rollout.cache_over_versions", rollout.cache_over_versions, "recomputed"),
        ("sglang.router_url", servers.router_url, ""),
        ("sglang.weights", servers.weights, "policy"),
    ):
        if value != plain:
            raise UserError(
                f"adapters.merge=false is not supported with {name}={value}; set "
                f"adapters.merge=true, or leave {name} out"
            )


def _check_asynchrony(config: Config) -> None:
    rollout, staleness = config.rollout, config.rollout.staleness_limit
    if rollout.asynchrony != "on_policy" and staleness < 1:
        raise UserError(
            f"rollout.asynchrony={rollout.asynchrony} trains on rollouts of older weights, which "
            f"rollout.max_staleness={staleness} drops; set it to 1 or more"
        )
    if not rollout.stops_the_tail:
        return
    chosen = f"rollout.long_tail={rollout.long_tail}"
    if rollout.asynchrony != "on_policy":
        raise UserError(
            f"{chosen} is for on_policy; with rollout.asynchrony={rollout.asynchrony} no step "
            "waits for the long tail; set it to wait"
        )
    if rollout.over_sampling_batch_size <= rollout.rollout_batch_size:
        raise UserError(
            f"{chosen} needs rollout.over_sampling_batch_size={rollout.over_sampling_batch_size} "
            f"above rollout_batch_size={rollout.rollout_batch_size}; raise it"
        )
    if rollout.long_tail == "continue" and staleness < 1:
        raise UserError(
            f"{chosen} continues rollouts that older weights sampled, which "
            "rollout.max_staleness=0 drops; set max_staleness=1, or long_tail=restart or gather"
        )
    if rollout.long_tail == "gather" and staleness:
        raise UserError(
            f"{chosen} samples every prompt by the weights that train on it, and "
            f"rollout.max_staleness={staleness} allows older ones; set it to 0"
        )


def _check_kept_caches(config: Config) -> None:
    rollout, servers, mismatch = config.rollout, config.sglang, config.mismatch
    if rollout.cache_over_versions == "recomputed":
        return
    for name, value, needed in (
        ("rollout.engine", rollout.engine, "sglang"),
        ("rollout.asynchrony", rollout.asynchrony, "fully_async"),
    ):
        if value != needed:
            raise UserError(
                f"rollout.cache_over_versions=kept needs {name}={needed}, in which new weights find"
                f" requests in flight on servers, not {value}; leave it out"
            )
    if servers.router_url or servers.sync_method == "delta":
        name = "sglang.router_url" if servers.router_url else "sglang.sync_method=delta"
        raise UserError(
            f"rollout.cache_over_versions=kept is not possible with {name}, by which the trainer "
            "does not reach the servers to pause them; reset one of them"
        )
    if mismatch.old_policy != "trainer" and mismatch.correction == "none":
        raise UserError(
            "rollout.cache_over_versions=kept samples tokens that no single version of the weights "
            f"gives, and mismatch.old_policy={mismatch.old_policy} takes their log-probs for those "
            "of an old policy; set mismatch.correction=token_tis or mismatch.old_policy=trainer"
        )


def _check_data(config: Config) -> None:
    evaluation = config.evaluation
    for name in evaluation.per_set:
        if name not in evaluation.eval_data:
            known = ", ".join(evaluation.eval_data) or "none"
            raise UserError(
                f"evaluation.per_set has {name!r}, which is not a set of evaluation.eval_data "
                f"({known})"
            )
    if not all(word.strip() for word in evaluation.reflection_words):
        raise UserError("evaluation.reflection_words has an empty word; leave it out")
    if "" in config.rollout.stop:
        raise UserError("rollout.stop has an empty text; leave it out")
    data = config.data
    if data.sources and data.prompt_data:
        raise UserError(
            f"data.prompt_data={data.prompt_data!r} and data.sources are both set; keep one of them"
        )
    least, most = data.min_pass_rate, data.max_pass_rate
    if data.pass_rates and (least > most or (least, most) == (0, 1)):
        raise UserError(
            f"data.pass_rates keeps prompts from data.min_pass_rate={least:g} to "
            f"max_pass_rate={most:g}, which is {'every one' if least < most else 'none'}; set "
            "data.min_pass_rate=0.1 and data.max_pass_rate=0.9, for example"
        )


def _check_keep_best(config: Config) -> None:
    wanted, evaluation = config.run.keep_best, config.evaluation
    if not wanted:
        return
    numbers = [
        f"eval/{n}/{at_k}" for n in evaluation.eval_data for at_k in ("avg_at_k", "pass_at_k")
    ]
    if wanted not in numbers:
        raise UserError(
            f"run.keep_best={wanted!r} is not one of {', '.join(numbers) or 'the numbers'} of "
            "evaluation.eval_data; set it to one of these, or leave it empty"
        )
    between, saved = evaluation.eval_interval, config.run.save_interval
    if not between or not saved or between % saved:
        raise UserError(
            f"run.keep_best={wanted} needs steps that are evaluated, and each of them saved, which "
            f"evaluation.eval_interval={between} with run.save_interval={saved} does not give; "
            f"set run.save_interval={between or 50}{'' if between else ' and eval_interval=50'}"
        )


def _check_rewards(config: Config) -> None:
    scoring = config.scoring
    named = PER_SOURCE in scoring.names
    if named and not scoring.per_source:
        raise UserError(
            "scoring.reward=per_source needs the reward of each data set; set "
            "'scoring.per_source={name: math, other: code}'"
        )
    if scoring.per_source and not named:
        raise UserError(
            f"scoring.per_source={scoring.per_source} has no effect; set scoring.reward=per_source,"
            " or leave it out"
        )
    if PER_SOURCE in scoring.per_source.values():
        raise UserError("scoring.per_source has itself as a reward; name another one")


def _check_servers(config: Config) -> None:
    servers = config.sglang
    addresses = {
        "urls": servers.urls,
        "router_url": [servers.router_url],
        "relays": servers.relays,
    }
    for key, urls in addresses.items():
        for url in filter(None, urls):
            if not url.startswith(("http://", "https://")):
                raise UserError(
                    f"sglang.{key} has {url!r}, which is not an address; write http://host:port"
                )
    if servers.sync_method == "delta" and not servers.relays:
        raise UserError(
            "sglang.sync_method=delta needs sglang.relays; start one next to the servers (python "
            "-m megatron_stare relay DIRECTORY), and name it: 'sglang.relays=[http://host:31000]'"
        )
    if servers.colocated and servers.sync_method == "broadcast":
        raise UserError(
            "sglang.sync_method=broadcast needs separate GPUs for trainer and servers, and "
            "sglang.colocated=true shares them; leave it out, so that memory handles are passed, "
            "or set it to disk"
        )
    if servers.colocated and config.rollout.asynchrony != "on_policy":
        raise UserError(
            f"rollout.asynchrony={config.rollout.asynchrony} generates while it trains, and "
            "sglang.colocated=true has memory for one of them; set rollout.asynchrony=on_policy or "
            "sglang.colocated=false"
        )


def _check_served_weights(config: Config) -> None:
    policy, mismatch, weights = config.policy, config.mismatch, config.sglang.weights
    if weights == "policy":
        return
    if policy.dtype != "bf16":
        raise UserError(
            f"sglang.weights={weights} needs policy.dtype=bf16, in which servers keep the other "
            f"weights, not {policy.dtype}"
        )
    corrected = mismatch.correction != "none" or mismatch.old_policy == "rollout"
    if weights == "fp8" and policy.weight_quantization == "none" and not corrected:
        raise UserError(
            "sglang.weights=fp8 samples with rounded weights, and nothing corrects for it; set "
            "mismatch.correction=token_tis, or policy.weight_quantization=fp8 to train the rounded "
            "weights, or sglang.weights=fp8_uncorrected to go without"
        )


def _check_speculation(config: Config) -> None:
    servers = config.sglang
    if found := re.search(r"--speculative\S*", servers.server_args):
        raise UserError(
            f"sglang.server_args has {found[0]}; set sglang.speculation, which keeps out what makes"
            " sampling inexact"
        )
    if servers.speculation == "none":
        return
    if servers.deterministic:
        raise UserError(
            f"sglang.speculation={servers.speculation} draws other tokens than "
            "sglang.deterministic=true promises; reset one of them"
        )
    if config.policy.routing_replay == "rollout":
        raise UserError(
            f"policy.routing_replay=rollout is not possible with sglang.speculation="
            f"{servers.speculation}, whose servers return no expert choices; reset one of them"
        )
    given = re.search(r"--max-running-requests[ =](\d+)", servers.server_args)
    if given and int(given[1]) < servers.max_concurrency:
        raise UserError(
            f"sglang.server_args has {given[0]}, fewer than sglang.max_concurrency="
            f"{servers.max_concurrency}; leave it out"
        )


def _check_sandbox(config: Config) -> None:
    sandbox = config.sandbox
    if sandbox.url and not sandbox.url.startswith(("http://", "https://")):
        raise UserError(f"sandbox.url={sandbox.url!r} is not an address; write http://host:port")
    if sandbox.url and sandbox.stateful:
        raise UserError(
            f"sandbox.stateful=true is not possible with sandbox.url={sandbox.url}, which keeps no "
            "state between calls; set stateful=false, or leave url empty"
        )


def _check_agents(config: Config) -> None:
    agents = config.agents
    if "episode" in config.scoring.names and not agents.active:
        raise UserError(
            "scoring.reward=episode is the reward that an agent returns, and there is none; set "
            "agents.function or agents.command"
        )
    if not agents.active:
        return
    if agents.function and agents.command:
        raise UserError(
            f"agents.function={agents.function} and agents.command are both set; keep one of them"
        )
    if config.tools.environment:
        raise UserError(
            f"tools.environment={config.tools.environment} has no effect on an agent, which runs "
            "its own tools; leave it empty"
        )
    if config.policy.routing_replay == "rollout":
        raise UserError(
            "policy.routing_replay=rollout has no place in agents' episodes yet; set "
            "policy.routing_replay=none"
        )


def _check_judge(config: Config) -> None:
    scoring, judge = config.scoring, config.judge
    if "judge" not in scoring.names:
        return
    if bool(judge.urls) == bool(judge.checkpoint):
        raise UserError(
            "scoring.reward=judge needs a language model; set either judge.urls, to servers that "
            "run, or judge.checkpoint, to start some"
        )
    for url in judge.urls:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"judge.urls: {url!r} is not an address; write http://host:port/v1")
    if judge.kind == "pairwise" and config.rollout.n_samples_per_prompt < 2:
        raise UserError(
            "judge.kind=pairwise compares responses to one prompt, and "
            f"rollout.n_samples_per_prompt={config.rollout.n_samples_per_prompt}; raise it"
        )
