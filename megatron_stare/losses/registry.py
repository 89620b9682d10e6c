"""`@policy_loss`: the function's name is its config name,
its keyword-only arguments are its settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megatron_stare.config import LossConfig, UserError, callable_at, nearest
from megatron_stare.config.section import written
from megatron_stare.losses.kl import kl_penalty, top_k_divergence
from megatron_stare.losses.planning import Planner, Step, coefficients, nothing
from megatron_stare.losses.settings import FIELD_SETTINGS, SHARED, Setting, declared, resolved
from megatron_stare.numerics.selection import Across
from megatron_stare.records import BoundLoss, LossPlan, LossTokens, Nucleus, Signals, TokenBatch

# Where a formula and its constants come from: the authors' code, their paper, or notes and ports.
Confidence = Literal["code", "paper", "second-hand"]
# fused: a function of one token. recompute: of its sequence. logits: of its whole distribution.
Head = Literal["fused", "recompute", "logits"]


# A pure function: LossTokens in, N losses out, no reduction. A token's loss depends on its own
# values alone or, with head "recompute", also on its sequence's (LossTokens.sequence_sum). Settings
# are its keyword-only arguments (losses/settings.py).
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Objective:
    """A loss, the plan that prepares it, and what trainer, head and tables must know of it.

    `weighted`: the loss applies `tokens.weight` itself. `corrects`: it applies `tokens.correction`
    itself, to its surrogate alone. `from_rollout`: its ratio starts at the rollout policy.
    `needs` names what a batch must hold beyond log-probs and advantages. `reweight` composes
    another objective's weights with this loss. `passes`: the settings of each update, if a batch is
    trained in several updates that have different ones. `tempering`: a function of the last plan's
    state and of settings, which returns the T at which this plan needs pi's log-probs too.
    `require`: raises UserError for settings that do not fit together.
    """

    name: str
    function: Loss
    planner: Planner = nothing
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
    family: str = ""
    source: str = ""
    confidence: Confidence = "code"
    aggregation: str = "token-mean"
    head: Head = "fused"
    entropy_gradient: bool = False
    weighted: bool = False
    corrects: bool = False
    from_rollout: bool = False
    needs: tuple[str, ...] = ()
    reweight: Objective | None = None
    passes: tuple[Mapping[str, Any], ...] = ({},)
    tempering: Callable[..., float] | None = None
    require: Callable[[Mapping[str, Any]], None] | None = None

    @property
    def per_token(self) -> bool:
        """Whether a token's loss depends on its own values alone."""
        return self.head != "recompute"

    @property
    def needs_scores(self) -> bool:
        """Whether the plan reads surprisal or entropy, so that a scoring pass must come first."""
        return self.planner is not nothing or self.reweight is not None

    def needs_sensitivity(self, config: LossConfig) -> bool:
        """Whether the plan reads the entropy sensitivity of every token."""
        return "sensitivity" in self.needs or any(
            settings.get("select") in ("sensitivity", "rising")
            or settings.get("controller") == "critical"
            or settings.get("kernel") == "exact"
            for settings in (self._settings(config), self._weights_settings(config))
        )

    def nucleus_of(self, config: LossConfig) -> Nucleus | None:
        """The nucleus whose entropy the plan reads."""
        if "nucleus" not in self.needs:
            return None
        settings = self._settings(config)
        return Nucleus(settings["nucleus"], settings["crossing"] == "included")

    def proxy_threshold_of(self, config: LossConfig) -> float:
        """The share of the largest probability below which the plan's proxy distribution leaves a
        token out; 0: the plan reads no proxy.
        """
        return self._settings(config)["proxy_threshold"] if "proxy" in self.needs else 0.0

    def tempering_of(self, config: LossConfig, state: Mapping[str, float]) -> float | None:
        """The T at which the next plan wants the log-probs too; known before anything is scored."""
        if self.tempering is None:
            return None
        return self.tempering(state, **self._for(self.tempering, self._settings(config)))

    def loss(self, tokens: LossTokens, config: LossConfig) -> Tensor:
        """The tokens' losses under a configuration, without correction and KL."""
        return self.function(tokens, **self._for(self.function, self._settings(config)))

    def plan(
        self, batch: TokenBatch, config: LossConfig, across: Across, state: Mapping[str, float]
    ) -> Signals:
        """The batch-wide work of one optimizer step; `state` is what the last plan left.

        A batch without a loss token on any rank is not planned for: its state stays.
        """
        coefficient_T = self.coefficients(batch, config, across)
        step = Step(batch, across, dict(state), coefficient_T)
        plan = omega = LossPlan()  # omega: the weights of the objective composed with this one
        if step.tokens and self.needs_scores:
            plan = self.planner(step, **self._for(self.planner, self._settings(config)))
            if self.reweight is not None:
                planner = self.reweight.planner
                omega = planner(step, **self._for(planner, self._weights_settings(config)))
        if plan.kept_T is not None:
            coefficient_T = self.coefficients(batch, config, across, plan.kept_T)
        weight_T = coefficient_T.new_ones(coefficient_T.shape)
        for factor_T in (plan.weight_T, omega.weight_T):
            weight_T = weight_T if factor_T is None else weight_T * factor_T.to(weight_T.dtype)
        left = dict(state) if plan.state is None else plan.state
        return Signals(
            coefficient_T=coefficient_T,
            weight_T=weight_T,
            metrics=omega.metrics | plan.metrics,
            state=left | (omega.state or {}),
            kept_T=plan.kept_T,
            values=plan.values,
            numbers=plan.numbers,
            chosen_T=plan.chosen_T if omega.chosen_T is None else omega.chosen_T,
        )

    def coefficients(
        self, batch: TokenBatch, config: LossConfig, across: Across, kept_T: Tensor | None = None
    ) -> Tensor:
        """The reduction of the configuration, else of this objective, over the tokens kept."""
        aggregation = config.aggregation or self.aggregation
        return coefficients(batch, aggregation, across, kept_T, config.padded_length)

    def target_entropy(self, config: LossConfig) -> float | None:
        """The entropy [nats] to which the loss, or the one it is composed with, steers the batch;
        None: to none.
        """
        settings = self._settings(config) | self._weights_settings(config)
        return settings.get("target_entropy", settings.get("target"))

    def reads_logits(self, config: LossConfig) -> bool:
        """Whether the loss reads every token's whole distribution, its own or for a teacher."""
        return self.head == "logits" or config.distillation_top_k > 0

    def passes_of(self, config: LossConfig) -> tuple[Mapping[str, Any], ...]:
        """The passes, but for those of a setting that the configuration fixes."""
        fixed = any(name in config.settings for settings in self.passes for name in settings)
        return ({},) if fixed else self.passes

    def bind(self, config: LossConfig, instead: Mapping[str, Any] | None = None) -> BoundLoss:
        """The loss with its settings filled in, as the actor takes it: corrected for the rollout
        policy, plus a teacher's exact divergence, plus KL. `instead`: settings of a pass.
        """
        settings = self._for(self.function, self._settings(config) | dict(instead or {}))
        coefficient, kind = config.kl_loss_coef, config.kl_loss_type

        def whole(tokens: LossTokens) -> Tensor:
            if self.per_token and not tokens.surprisal.numel():
                return tokens.surprisal  # without a loss token there is no plan to read
            loss = self._one_value_per_token(self.function(tokens, **settings), tokens)
            loss = loss if self.weighted else loss * tokens.weight
            if tokens.correction is not None and not self.corrects:
                loss = loss * tokens.correction
            if config.distillation_top_k:
                loss = loss + config.distillation_coef * top_k_divergence(tokens)
            return loss + coefficient * kl_penalty(tokens, kind) if coefficient else loss

        return BoundLoss(whole, self.per_token, self.entropy_gradient, self.reads_logits(config))

    def _one_value_per_token(self, loss: Any, tokens: LossTokens) -> Tensor:
        """The loss as it is. UserError where it is reduced: the global denominator is applied
        later, so that a loss that reduces would depend on the micro-batches.
        """
        expected = tuple(tokens.surprisal.shape)
        if not isinstance(loss, Tensor) or tuple(loss.shape) != expected:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))
            raise UserError(
                f"the loss {self.name} returned {found} for {expected[0]} tokens; return one value "
                f"per token, shape {expected}, without mean() or sum(): loss.aggregation reduces"
            )
        return loss

    def check(self, config: LossConfig) -> None:
        """UserError for settings that this objective does not read or cannot take."""
        settings = self._settings(config)
        if self.require:
            self.require(settings)
        self._weights_settings(config)
        for name in self.unread(config):
            field = FIELD_SETTINGS[name]
            raise self.refusal(name, f"{field.key}={written(getattr(config, name))}")

    def unread(self, config: LossConfig) -> list[str]:
        """The fields of LossConfig that are set and that neither this objective nor the weights it
        is composed with read. The target is none of them: reports draw it for every run.
        """
        return [
            name
            for name, field in FIELD_SETTINGS.items()
            if name != "target_entropy"
            and not self.reads(name)
            and getattr(config, name) != field.default
        ]

    def reads(self, name: str) -> bool:
        """Whether this objective, or the weights composed with it, read a field of LossConfig."""
        composed = self.reweight is not None and name in declared(self.reweight.planner)
        own = name in self.settings and self.settings[name].is_field
        return name not in FIELD_SETTINGS or own or composed

    def refusal(self, name: str, written: str) -> UserError:
        """The error for a field that nothing reads."""
        readers = sorted(other.name for other in _objectives.values() if other.reads(name))
        named = ", ".join(readers[:8]) + (f" and {len(readers) - 8} more" if readers[8:] else "")
        also = "; or set loss.reweight=stare, which reads it" if readers == ["stare"] else ""
        return UserError(
            f"{written} has no effect: the objective {self.name} does not read it; remove it, or "
            f"use one that does: {named}{also}"
        )

    def _settings(self, config: LossConfig) -> dict[str, Any]:
        return resolved(self.name, self.settings, config)

    def _weights_settings(self, config: LossConfig) -> dict[str, Any]:
        if self.reweight is None:
            return {}
        return self.reweight._settings(dataclasses.replace(config, settings={}))

    @staticmethod
    def _for(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: settings[name] for name in declared(function)}


_objectives: dict[str, Objective] = {}


def policy_loss(
    plan: Planner = nothing, *, fields: frozenset[str] = SHARED, **facts: Any
) -> Callable[[Loss], Loss]:
    """Register a loss under its function's name, with the facts that Objective has fields for.
    `fields` names the settings that LossConfig has fields for. ValueError where the name is taken.
    """

    def register(loss: Loss) -> Loss:
        functions = (loss, plan, *filter(None, [facts.get("tempering")]))
        settings = declared(*functions, fields=fields)
        _add(Objective(loss.__name__, loss, plan, settings, **facts))
        return loss

    return register


def variant(name: str, of: str, presets: Mapping[str, Any], **facts: Any) -> None:
    """Register `of` once more, under another name, with other defaults and facts."""
    parent = _objectives[of]
    settings = dict(parent.settings)
    for key, value in presets.items():
        settings[key] = dataclasses.replace(settings[key], default=settings[key].checked(value))
    _add(dataclasses.replace(parent, name=name, settings=settings, **facts))


def _add(objective: Objective) -> None:
    if objective.name in _objectives:
        raise ValueError(f"two losses are named {objective.name!r}")
    _objectives[objective.name] = objective


def find_objective(name: str) -> Objective:
    """The objective of that name, or of a function of the user's by its dotted path. UserError for
    an unknown one, with the valid names and the nearest.
    """
    if "." in name:
        return _own_objective(name)
    if name not in _objectives:
        raise UserError(f"loss.name={name!r} is unknown{nearest(name, _objectives, 'algorithms')}")
    return _objectives[name]


def _own_objective(path: str) -> Objective:
    """The objective that importing a module of the user's has registered."""
    function = callable_at(path, "loss.name", "a function under @policy_loss()")
    found = _objectives.get(function.__name__)
    if found is None or found.function is not function:
        raise UserError(
            f"loss.name={path!r} is a function, but no objective; put @policy_loss() above it "
            "(from megatron_stare.losses import policy_loss)"
        )
    return found


def objective_of(config: LossConfig) -> Objective:
    """The objective that a configuration asks for, with the weights it is composed with.
    UserError for an unknown name and for settings that do not fit.
    """
    if config.name == config.reweight != "none":
        raise UserError(
            f"loss.reweight={config.reweight} and loss.name={config.name} would weigh twice; set "
            "loss.reweight=none"
        )
    objective = _composed(config)
    objective.check(config)
    return objective


def reading(config: LossConfig, given: Collection[str] = ()) -> LossConfig:
    """The configuration without the fields that its objective does not read, but for those that
    are `given`: what runs with several objectives share. UserError: an unknown objective.
    """
    unread = set(_composed(config).unread(config)) - set(given)
    return dataclasses.replace(config, **{name: FIELD_SETTINGS[name].default for name in unread})


def _composed(config: LossConfig) -> Objective:
    objective = find_objective(config.name)
    if config.reweight == "none":
        return objective
    return dataclasses.replace(objective, reweight=find_objective(config.reweight))


def all_objectives() -> dict[str, Objective]:
    """Every objective by its name, in the order of their names."""
    return dict(sorted(_objectives.items()))
