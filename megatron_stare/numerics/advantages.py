"""Advantage estimators: from the rewards of a batch to one number per response. Pure functions.

With R the reward of a response, n the responses of its group, l their loss tokens, all means over
the group unless said otherwise, eps = 1e-6 and std with divisor n - 1:

    grpo                          (R - mean) / (std + eps)                     arXiv 2402.03300
    dr_grpo                       R - mean                                     arXiv 2503.20783
    rloo                          (R - mean) n / (n - 1)                       arXiv 2402.14740
    opo                           R - sum l R / sum l                          arXiv 2505.23585
    reinforce_plus_plus           W(R)                                         arXiv 2501.03262
    reinforce_plus_plus_baseline  W(R - mean)                                  the same
    remax                         R - b, b the reward of a greedy response     arXiv 2310.10505
    gpg                           (R - mean) B / #{R != 0} / f_norm            arXiv 2504.02546
    grpo_passk                    (R - second best) / (std + eps), best only   arXiv 2503.19595
    hapo                          (R - m) / (s + eps), m and s over the group's tokens,
                                  s with divisor n; grpo's where any |A| >= 5  arXiv 2509.16591
    w_reinf, psr, nsr             +0.1 if right, -1 if wrong; +1; -1           arXiv 2506.01347
    dcpo                          the smaller of (t N + P) / (t + 1) and
                                  (N + t P) / (t + 1), t earlier visits        arXiv 2509.02333
    qae                           (R - Q) / (std + eps), Q a quantile          arXiv 2509.22611

N = (R - mean) / std of the group, P the same with mean and std of all visits' rewards to the
prompt; both without eps, and 0 where the std is 0.

W whitens over all tokens of the global batch: (x - mean) / sqrt(var + 1e-8), var with divisor
N - 1. A group of one keeps its raw reward (grpo: over 1 + eps), but for hapo and dcpo, which
give 0. Names and details are those of the authors' code and of verl; qae's is inferred from its
paper.

Everything is fp64 and exactly 0 for equal rewards, except in dcpo from a prompt's second visit on.
Shape legend: B responses, G groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stare.config import UserError, callable_at, nearest

EPSILON = 1e-6
_WHITENING_EPSILON = 1e-8
_HAPO_LARGEST = 5.0


@dataclass(frozen=True)
class Outcomes:
    """Rewards and lengths of B responses. `group_B` counts the groups from 0; `tokens_B` are loss
    tokens; `baseline_B` is the reward of a greedy response to the same prompt, where there is one.
    `earlier_B3`: earlier visits to the response's prompt, and mean and standard deviation of their
    rewards; None: there was none.
    """

    reward_B: Tensor
    group_B: Tensor
    tokens_B: Tensor
    correct_B: Tensor
    baseline_B: Tensor | None = None
    earlier_B3: Tensor | None = None

    def sum(self, value_B: Tensor) -> Tensor:
        """The sum of the values of each response's group."""
        groups = int(self.group_B.max()) + 1 if self.group_B.numel() else 0
        total_G = value_B.new_zeros(groups).index_add_(0, self.group_B, value_B)
        return total_G[self.group_B]

    @property
    def size_B(self) -> Tensor:
        """n of each response's group."""
        return self.sum(torch.ones_like(self.reward_B))

    @property
    def lowest_B(self) -> Tensor:
        """The smallest reward of each response's group: from there equal rewards are exactly 0."""
        return self._extreme("amin")

    @property
    def highest_B(self) -> Tensor:
        """The largest reward of each response's group."""
        return self._extreme("amax")

    def centred(self, weight_B: Tensor | None = None) -> Tensor:
        """R less its group's mean, or less the mean weighted by `weight_B` (a group without weight
        has mean 0); R itself in a group of one.
        """
        weight_B = torch.ones_like(self.reward_B) if weight_B is None else weight_B
        total_B, above_B = self.sum(weight_B), self.reward_B - self.lowest_B
        mean_B = self.lowest_B + self.sum(weight_B * above_B) / total_B.clamp(min=1.0)
        mean_B = torch.where((self.size_B > 1) & (total_B > 0), mean_B, 0.0)
        # twice from the lowest, so that equal rewards leave no rounding error
        return torch.where(mean_B == 0, self.reward_B, above_B - (mean_B - self.lowest_B))

    @property
    def std_B(self) -> Tensor:
        """The standard deviation of each response's group, divisor n - 1; 1 in a group of one."""
        square_B = self.sum(self.centred().square())
        return torch.where(self.size_B > 1, (square_B / (self.size_B - 1)).sqrt(), 1.0)

    @property
    def visits_B3(self) -> Tensor:
        """`earlier_B3` after this visit. Means are weighted by visits, not by responses, and the
        variance adds what lies between the means, as in the authors' code:
        (t s^2 + sd^2 + t / (t + 1) (mu - m)^2) / (t + 1) for t visits of mean m and deviation s.
        """
        alone_B = self.size_B < 2
        mu_B = torch.where(alone_B, self.reward_B, self.reward_B - self.centred())
        sd_B = torch.where(alone_B, 0.0, self.std_B)
        if self.earlier_B3 is None:
            return torch.stack([torch.ones_like(mu_B), mu_B, sd_B], 1)
        t_B, m_B, s_B = self.earlier_B3.unbind(1)
        between_B = t_B / (t_B + 1) * (mu_B - m_B).square()
        variance_B = (t_B * s_B.square() + sd_B.square() + between_B) / (t_B + 1)
        mean_B = m_B + (mu_B - m_B) / (t_B + 1)  # exactly m where nothing differs
        return torch.stack([t_B + 1, mean_B, variance_B.sqrt()], 1)

    def _extreme(self, which: str) -> Tensor:
        groups = int(self.group_B.max()) + 1 if self.group_B.numel() else 0
        empty_G = self.reward_B.new_zeros(groups)
        return empty_G.scatter_reduce(0, self.group_B, self.reward_B, which, include_self=False)[
            self.group_B
        ]


@dataclass(frozen=True)
class Estimator:
    """A named function of Outcomes. `settings` are its keyword-only arguments with their defaults,
    or `inspect.Parameter.empty` where there is none. `relative`: a response is judged by others of
    its group. `leaves_out`: responses that leave the loss and its denominator, wrong or correct.
    `greedy`: it wants Outcomes.baseline_B, the reward of a greedy response to each prompt.
    `remembers`: it wants Outcomes.earlier_B3, the rewards of a prompt's earlier visits.
    """

    name: str
    function: Callable[..., Tensor]
    settings: Mapping[str, Any]
    relative: bool = True
    leaves_out: str = ""
    greedy: bool = False
    remembers: bool = False

    def __call__(self, outcomes: Outcomes, **settings: Any) -> Tensor:
        """The advantages [B]. UserError: a setting it does not have, or one that is missing; a
        result that is not a finite number for every response.
        """
        self.check(settings)
        found = self.function(outcomes, **settings)
        wanted = outcomes.reward_B.shape
        if not isinstance(found, Tensor) or found.shape != wanted or not found.isfinite().all():
            raise UserError(
                f"advantage {self.name!r} must return a tensor of {wanted.numel()} finite numbers, "
                f"one for each response, not {found}"
            )
        return found

    def check(self, settings: Mapping[str, Any], prefix: str = "") -> None:
        """UserError for settings it does not have and for required ones that are missing."""
        for name in settings:
            if name not in self.settings:
                raise UserError(
                    f"{prefix}{name}: advantage {self.name!r} has no such setting"
                    f"{nearest(name, self.settings)}"
                )
        for name, default in self.settings.items():
            if default is inspect.Parameter.empty and name not in settings:
                raise UserError(
                    f"advantage {self.name!r} needs {prefix}{name}, for which no value is "
                    "published; give one"
                )

    def left_out(self, outcomes: Outcomes) -> Tensor:
        """bool [B]: the responses that leave the loss and its denominator."""
        if not self.leaves_out:
            return torch.zeros_like(outcomes.correct_B)
        return outcomes.correct_B if self.leaves_out == "correct" else ~outcomes.correct_B


ESTIMATORS: dict[str, Estimator] = {}


def find_estimator(name: str) -> Estimator:
    """The estimator of that name, or a user's function at package.module.name. UserError: there is
    none; it lists the nearest name.
    """
    if "." in name:
        function = callable_at(name, "advantage", "a function of Outcomes")
        own = next((one for one in ESTIMATORS.values() if one.function is function), None)
        return own or _made(name, function)
    if name not in ESTIMATORS:
        raise UserError(
            f"advantage {name!r} is unknown{nearest(name, ESTIMATORS)}, or give package.module.name"
        )
    return ESTIMATORS[name]


def _made(name: str, function: Callable[..., Tensor], **traits: Any) -> Estimator:
    parameters = inspect.signature(function).parameters.values()
    settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return Estimator(name, function, settings, **traits)


def estimator(
    *,
    relative: bool = True,
    leaves_out: str = "",
    greedy: bool = False,
    remembers: bool = False,
) -> Callable[[Any], Any]:
    """Register a function under its name; its keyword-only arguments are its settings. UserError:
    another module has one of this name.
    """

    traits = {"leaves_out": leaves_out, "greedy": greedy, "remembers": remembers}

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = function.__name__
        known = ESTIMATORS.get(name)
        if known and known.function.__module__ != function.__module__:
            raise UserError(f"advantage {name!r} exists already; give the function another name")
        ESTIMATORS[name] = _made(name, function, relative=relative, **traits)
        return function

    return register


def whitened(value_K: Tensor, count_K: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over values that each stand for `count_K` tokens; var with
    divisor N - 1. Fewer than two tokens are only centred.
    """
    total = count_K.sum()
    value_K = value_K - value_K[:1]  # equal values leave no rounding error
    mean = (count_K * value_K).sum() / total.clamp(min=1.0)
    centred_K = value_K - mean
    variance = (count_K * centred_K.square()).sum() / (total - 1).clamp(min=1.0)
    return centred_K * torch.rsqrt(variance + _WHITENING_EPSILON)


@estimator()
def grpo(outcomes: Outcomes, *, normalize_by_std: bool = True) -> Tensor:
    """(R - mean) / (std + eps); a group of one has mean 0 and std 1."""
    scale_B = outcomes.std_B + EPSILON if normalize_by_std else 1.0
    return outcomes.centred() / scale_B


@estimator()
def dr_grpo(outcomes: Outcomes) -> Tensor:
    """R - mean."""
    return outcomes.centred()


@estimator()
def rloo(outcomes: Outcomes) -> Tensor:
    """R less the mean of the others: (R - mean) n / (n - 1)."""
    size_B = outcomes.size_B
    factor_B = torch.where(size_B > 1, size_B / (size_B - 1).clamp(min=1.0), 1.0)
    return outcomes.centred() * factor_B


@estimator()
def opo(outcomes: Outcomes) -> Tensor:
    """R less the group's mean weighted by length; without a loss token the baseline is 0."""
    return outcomes.centred(outcomes.tokens_B)


@estimator(relative=False)
def reinforce_plus_plus(outcomes: Outcomes) -> Tensor:
    """R whitened over the tokens of the global batch (undiscounted)."""
    return whitened(outcomes.reward_B, outcomes.tokens_B)


@estimator()
def reinforce_plus_plus_baseline(outcomes: Outcomes) -> Tensor:
    """R - mean, whitened over the tokens of the global batch."""
    return whitened(outcomes.centred(), outcomes.tokens_B)


@estimator(relative=False, greedy=True)
def remax(outcomes: Outcomes) -> Tensor:
    """R less the reward of a greedy response to the same prompt."""
    if outcomes.baseline_B is None:
        raise UserError(
            "advantage 'remax' needs the reward of a greedy response to each prompt; give them as "
            "baselines=..., one per response"
        )
    return outcomes.reward_B - outcomes.baseline_B


@estimator()
def gpg(outcomes: Outcomes, *, f_norm: float = 1.0) -> Tensor:
    """(R - mean) times B over the number of rewards that are not 0, over `f_norm`."""
    scored = outcomes.reward_B.count_nonzero().clamp(min=1)
    return outcomes.centred() * (outcomes.reward_B.numel() / scored) / f_norm


@estimator()
def grpo_passk(outcomes: Outcomes, *, normalize_by_std: bool = True) -> Tensor:
    """The best response gets its lead over the second best, over (std + eps); the others 0."""
    alone_B = outcomes.size_B < 2
    if bool(alone_B.any()):
        raise UserError(
            f"advantage 'grpo_passk' needs two responses or more in every group; group "
            f"{int(outcomes.group_B[alone_B][0])} has one"
        )
    best_B = outcomes.reward_B == outcomes.highest_B
    # of several best ones the lead is 0
    below_B = torch.where(best_B, outcomes.lowest_B, outcomes.reward_B)
    below = Outcomes(below_B, outcomes.group_B, outcomes.tokens_B, outcomes.correct_B)
    lead_B = outcomes.reward_B - below.highest_B
    single_B = outcomes.sum(best_B.to(lead_B.dtype)) == 1
    scale_B = outcomes.std_B + EPSILON if normalize_by_std else 1.0
    return torch.where(best_B & single_B, lead_B, 0.0) / scale_B


@estimator()
def hapo(outcomes: Outcomes, *, normalize_by_std: bool = True, padding: bool = False) -> Tensor:
    """(R - m) / (s + eps) with mean and spread of the group's tokens; GRPO's advantages for a group
    in which one is 5 or more. A group of one gets 0. `padding`: the advantage of a padded token,
    whose R is 0, counts there too, as in the authors' code; every group has padding. Off by
    default: otherwise nearly equal rewards that are far from 0 would always be GRPO's.
    """
    tokens_B = outcomes.tokens_B
    centred_B = torch.where(outcomes.size_B > 1, outcomes.centred(tokens_B), 0.0)
    square_B = outcomes.sum(tokens_B * centred_B.square())
    spread_B = (square_B / outcomes.sum(tokens_B).clamp(min=1.0)).sqrt()
    found_B = centred_B / (spread_B + EPSILON) if normalize_by_std else centred_B
    extreme_B = (found_B.abs() >= _HAPO_LARGEST) & (tokens_B > 0)
    if padding:  # (0 - m) / (s + eps) = found - R / (s + eps)
        scale_B = spread_B + EPSILON if normalize_by_std else 1.0
        extreme_B |= (found_B - outcomes.reward_B / scale_B).abs() >= _HAPO_LARGEST
    extreme_B = extreme_B.to(found_B.dtype)
    fallback_B = grpo(outcomes, normalize_by_std=normalize_by_std)
    return torch.where(outcomes.sum(extreme_B) > 0, fallback_B, found_B)


@estimator(remembers=True)
def dcpo(outcomes: Outcomes) -> Tensor:
    """The smooth advantage of DCPO: N, standardised within the group, and P, within all visits to
    the prompt, mixed in two ways; of the two mixtures the one of smaller magnitude. A group of
    equal rewards has N = 0 and still learns where an earlier visit was better or worse.
    """
    alone_B = outcomes.size_B < 2
    visits_B, mean_B, spread_B = outcomes.visits_B3.unbind(1)
    now_B = _ratio(torch.where(alone_B, 0.0, outcomes.centred()), outcomes.std_B)
    ever_B = now_B
    if outcomes.earlier_B3 is not None:
        centred_B = torch.where(visits_B > 1, outcomes.reward_B - mean_B, now_B * outcomes.std_B)
        ever_B = _ratio(centred_B, spread_B)
    one_B = ((visits_B - 1) * now_B + ever_B) / visits_B
    other_B = ((visits_B - 1) * ever_B + now_B) / visits_B
    return torch.where(one_B.abs() <= other_B.abs(), one_B, other_B)


def _ratio(value_B: Tensor, by_B: Tensor) -> Tensor:
    """value / by, 0 where `by` is 0."""
    return torch.where(by_B > 0, value_B / by_B.clamp(min=torch.finfo(by_B.dtype).tiny), 0.0)


@estimator(relative=False)
def w_reinf(outcomes: Outcomes, *, positive: float = 0.1) -> Tensor:
    """`positive` for a correct response, -1 for a wrong one."""
    correct_B = outcomes.correct_B.to(outcomes.reward_B.dtype)
    return positive * correct_B - (1.0 - correct_B)


@estimator(relative=False, leaves_out="wrong")
def psr(outcomes: Outcomes) -> Tensor:
    """1 for a correct response; wrong ones leave the loss and its denominator."""
    return outcomes.correct_B.to(outcomes.reward_B.dtype)


@estimator(relative=False, leaves_out="correct")
def nsr(outcomes: Outcomes) -> Tensor:
    """-1 for a wrong response; correct ones leave the loss and its denominator."""
    return -(~outcomes.correct_B).to(outcomes.reward_B.dtype)


@estimator()
def qae(outcomes: Outcomes, *, quantile: float) -> Tensor:
    """R less Q, the smallest reward that at least a share `quantile` of the group does not exceed,
    over (std + eps). Inferred: of binary rewards a hard group then moves only its right responses,
    an easy one only its wrong ones. A group of one keeps its raw reward, over 1 + eps.
    """
    if not 0.0 < quantile < 1.0:
        raise UserError(f"quantile={quantile} of advantage 'qae' must lie inside (0, 1)")
    reward_B, baseline_B = outcomes.reward_B, torch.zeros_like(outcomes.reward_B)
    for group in outcomes.group_B.unique():
        rows = (outcomes.group_B == group).nonzero().flatten()
        if rows.numel() > 1:
            place = math.ceil(round(quantile * rows.numel(), 9)) - 1
            baseline_B[rows] = reward_B[rows].sort().values[place]
    return (reward_B - baseline_B) / (outcomes.std_B + EPSILON)
