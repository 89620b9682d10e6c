"""Our train step next to a plain transformers + torch one, where a run's time goes,
and what policy/runtime.py costs.

    export OMP_NUM_THREADS=1
    python benchmarks/train_step.py                                       all three tables
    python benchmarks/train_step.py --only-steps --sequences 48 --group 8 --prompts 38 38 \\
        --tokens 53 67                                                    short responses
    python benchmarks/train_step.py --runs runs/quickstart/seed0/stare    and a finished run's
    python benchmarks/train_step.py --json step.json

1. The same checkpoint, sequences, clipped loss (dapo, with old log-probs that differ from the
   model's), AdamW and clip, trained by Actor and by a plain script: AutoModelForCausalLM on the
   right-padded batch, log_softmax of the response rows, loss.backward, clip_grad_norm_, AdamW.
   "score + update" has a pass without gradient (surprisal, entropy) and ours plans in between.
   Round after round, the fastest counts; "of plain" compares with the plain step of the same kind,
   "of its CPU time" the processor time. All contenders do the same updates, so the losses of every
   round must agree to 1e-4, and the script ends with an error where they do not.
2. Seconds of the quickstart's phases in a few of its own steps after a shortened cold start (and in
   --runs), with one evaluation in every eval_interval steps. "rounds" are generation rounds per
   step, more where few groups carry signal; "other" is what Trainer does outside of the phases:
   packing, metrics.
3. What runtime.prepare() replaced and a step calls is counted during one step. Its cost per call is
   measured as the wrapper's time over the original's, as all of its time where a CPU has no
   original; the share is of the step's processor time. cProfile of another step gives it again, too
   high by what profiling adds to every Python call.

Shape legend: B sequences, S padded length, T response tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import machine, timed
from benchmarks._phases import CONSOLE, breakdown, quickstart_runs
from benchmarks._runtime_cost import runtime_cost
from megatron_stare.config import Config, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.losses import find_objective
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.topology import Topology, session
from megatron_stare.records import Group, Prompt, Rollout, TokenBatch


@dataclass
class Contender:
    """One kind of step; it returns loss and gradient norm. `times`:
    wall and processor seconds of its rounds.
    """

    name: str
    update_only: bool
    step: Callable[[], tuple[float, float]]
    positions: int
    times: list[tuple[float, float]] = field(default_factory=list)
    results: list[tuple[float, float]] = field(default_factory=list)


# ---- the sequences, the plain step and ours ----


def settings(checkpoint: Path, *overrides: str) -> Config:
    fixed = [
        f"policy.hf_checkpoint={checkpoint}",
        "loss.name=dapo",
        "loss.eps_clip=0.2",
        "loss.eps_clip_high=0.28",
        "loss.eps_clip_c=10",
        "optimizer.lr=1e-5",
        "optimizer.adam_beta2=0.98",
    ]
    return override(Config(), [*fixed, *overrides])


def sequences(options: argparse.Namespace, model: Any) -> list[Group]:
    """Groups with prompts and whole sequences of random lengths, old log-probs 0.2 nats off the
    model's.
    """
    generator, groups = torch.Generator().manual_seed(0), []

    def drawn(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator)

    def length(bounds: list[int]) -> int:
        return int(drawn(bounds[0], bounds[1] + 1))

    for number in range(options.sequences // options.group):
        rollouts, prompt = [], drawn(1, options.vocabulary, length(options.prompts))
        for advantage in numpy.linspace(-1.5, 1.5, options.group).tolist():
            response = drawn(1, options.vocabulary, length(options.tokens) - len(prompt))
            with torch.no_grad():
                logits_TV = model(torch.cat([prompt, response])[None]).logits[
                    0, len(prompt) - 1 : -1
                ]
            old_T = logits_TV.log_softmax(-1).gather(1, response[:, None])[:, 0]
            old_T += 0.2 * torch.randn(old_T.shape, generator=generator)
            values = (response.numpy(), old_T.numpy(), numpy.ones(len(response), bool))
            rollouts.append(
                Rollout(*values, status="completed", weight_version=0, advantage=advantage)
            )
        groups.append(Group(Prompt(number, prompt.numpy(), ""), tuple(rollouts)))
    return groups


class Plain:
    """The update of a short script without this project on the same groups."""

    def __init__(self, checkpoint: Path, groups: list[Group], config: Config) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.config = config
        decay = [p for p in self.model.parameters() if p.dim() > 1]  # Megatron decays matrices only
        rest = [p for p in self.model.parameters() if p.dim() == 1]
        adam = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": adam.weight_decay},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            eps=adam.adam_eps,
        )
        pairs = [
            (group.prompt.token_ids, rollout)
            for group in groups
            for rollout in group.rollouts
            if isinstance(rollout, Rollout)
        ]
        shape = (
            len(pairs),
            max(len(prompt) + len(rollout.response_ids) for prompt, rollout in pairs),
        )
        self.token_BS, self.real_BS = torch.zeros(2, *shape, dtype=torch.long)
        self.response_BS = torch.zeros(shape, dtype=torch.bool)
        for row, (prompt, rollout) in enumerate(pairs):
            ids = torch.tensor([*prompt, *rollout.response_ids])
            self.token_BS[row, : len(ids)], self.real_BS[row, : len(ids)] = ids, 1
            self.response_BS[row, len(prompt) : len(ids)] = True
        self.positions = self.token_BS[:, :-1].numel()
        self.old_T = torch.tensor([value for _, rollout in pairs for value in rollout.logprobs])
        self.advantage_T = torch.tensor([r.advantage for _, r in pairs]).repeat_interleave(
            self.response_BS.sum(1)
        )

    def _log_probabilities_TV(self) -> tuple[Tensor, Tensor]:
        """Logits of the response rows alone, and their targets: the frugal form."""
        kept_BS = self.response_BS[:, 1:]
        logits_BSV = self.model(self.token_BS[:, :-1], attention_mask=self.real_BS[:, :-1]).logits
        return logits_BSV[kept_BS].log_softmax(-1), self.token_BS[:, 1:][kept_BS]

    def update(self) -> tuple[float, float]:
        clip = self.config.loss
        log_probability_TV, target_T = self._log_probabilities_TV()
        ratio_T = (log_probability_TV.gather(1, target_T[:, None])[:, 0] - self.old_T).exp()
        advantage_T = self.advantage_T
        clipped_T = ratio_T.clamp(1 - clip.eps_clip, 1 + clip.eps_clip_high)
        loss_T = torch.maximum(-advantage_T * ratio_T, -advantage_T * clipped_T)
        dual_T = torch.minimum(loss_T, -advantage_T * clip.eps_clip_c)
        loss = torch.where(advantage_T < 0, dual_T, loss_T).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.optimizer.clip_grad
        )
        self.optimizer.step()
        return loss.item(), norm.item()

    def score_and_update(self) -> tuple[float, float]:
        with torch.no_grad():
            log_probability_TV, target_T = self._log_probabilities_TV()
            log_probability_TV.gather(1, target_T[:, None])
            -(log_probability_TV.exp() * log_probability_TV).sum(1)
        return self.update()


class Ours:
    """Score, plan and update as Learner runs them, on one batch."""

    def __init__(self, config: Config, topology: Topology, groups: list[Group]) -> None:
        self.config, self.topology = config, topology
        self.actor, self.objective = Actor(config, topology, 1000), find_objective(config.loss.name)
        batch = self.actor.pack(groups, 0)
        self.batch = dataclasses.replace(batch, old_surprisal_T=-batch.rollout_logprob_T)
        self.positions = sum(micro.token_BS.numel() for micro in batch.microbatches)

    def _update(self, batch: TokenBatch) -> tuple[float, float]:
        signals = self.objective.plan(batch, self.config.loss, self.topology.across, {})
        metrics, _ = self.actor.update(batch, self.objective.bind(self.config.loss), signals)
        return metrics["loss"], metrics["grad_norm"]

    def update(self) -> tuple[float, float]:
        return self._update(self.batch)

    def score_and_update(self) -> tuple[float, float]:
        return self._update(self.actor.score(self.batch))


def compare_steps(
    options: argparse.Namespace, topology: Topology, folder: Path
) -> tuple[list[dict[str, Any]], Ours]:
    """Table 1; also our packed contender, for table 3."""
    torch.manual_seed(0)
    cpu, contenders = torch.device("cpu"), []
    width, vocabulary = options.width, options.vocabulary
    shape = {"hidden_size": width, "intermediate_size": 11 * width // 4, "vocab_size": vocabulary}
    shape |= {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    layers = {
        "num_hidden_layers": options.layers,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(**shape, **layers), dtype=torch.float32
    ).eval()
    model.save_pretrained(folder)
    groups = sequences(options, model)
    plain, packed = (
        Plain(folder, groups, settings(folder)),
        Ours(settings(folder), topology, groups),
    )
    padded = Ours(settings(folder, "policy.packed_sequences=false"), topology, groups)
    shared = Ours(settings(folder, "policy.shared_prompts=true"), topology, groups)
    named: dict[str, Any] = {
        "plain transformers + torch": plain,
        "ours, packed": packed,
        "ours, packed, shared prompts": shared,
        "ours, padded": padded,
    }
    tokens = int(plain.real_BS.sum()) - len(plain.real_BS)  # the last token is only ever a target
    for update_only, (name, one) in itertools.product((True, False), named.items()):
        step = one.update if update_only else one.score_and_update
        contenders.append(Contender(name, update_only, step, one.positions))
    for round_number in range(options.rounds + 1):
        for contender in contenders:
            times = timed(lambda: contender.results.append(contender.step()), cpu)  # noqa: B023
            if round_number:
                contender.times.append(times)
    counts = (
        f"{options.sequences} sequences, {tokens} tokens, {int(plain.response_BS.sum())} of them "
        "responses"
    )
    title = (
        f"{options.layers} layers, H={width} V={vocabulary} fp32, {options.threads} thread(s); "
        f"{counts}"
    )
    return report_steps(contenders, title, tokens), packed


def report_steps(contenders: list[Contender], title: str, tokens: int) -> list[dict[str, Any]]:
    """Print table 1 and the agreement; SystemExit where losses differ by 1e-4 or more."""
    table = Table(title=title)
    for name in (
        "step",
        "implementation",
        "positions",
        "ms",
        "tokens/s",
        "of plain",
        "of its CPU time",
    ):
        table.add_column(name, justify="left" if name in ("step", "implementation") else "right")
    rows: list[dict[str, Any]] = []
    worst_loss = worst_norm = 0.0
    for contender in contenders:
        plain = next(other for other in contenders if other.update_only == contender.update_only)
        (best, cpu), (plain_best, plain_cpu) = (
            tuple(map(min, zip(*c.times, strict=True))) for c in (contender, plain)
        )
        of_plain, of_cpu = best / plain_best, cpu / plain_cpu
        row = {
            "name": contender.name,
            "update_only": contender.update_only,
            "seconds": best,
            "cpu_seconds": cpu,
        }
        row |= {
            "tokens_per_s": tokens / best,
            "of_plain": of_plain,
            "of_cpu": of_cpu,
            "results": contender.results,
        }
        rows.append(row)
        kind = "update" if contender.update_only else "score + update"
        figures = (f"{best * 1e3:.0f}", f"{tokens / best:.0f}", f"{of_plain:.2f}", f"{of_cpu:.2f}")
        table.add_row(kind, contender.name, str(contender.positions), *figures)
        for mine, theirs in zip(contender.results, plain.results, strict=True):
            worst_loss = max(worst_loss, abs(mine[0] - theirs[0]))
            worst_norm = max(worst_norm, abs(mine[1] / theirs[1] - 1))
    CONSOLE.print(table)
    first, rounds = contenders[0].results[0], len(contenders[0].results)
    print(
        f"loss of the first step {first[0]:.6f}, gradient norm {first[1]:.4f}; over {rounds} "
        "rounds of updates"
    )
    print(
        f"the losses differ by at most {worst_loss:.1e}, the norms by {worst_norm:.1e} relative\n"
    )
    if worst_loss >= 1e-4:
        raise SystemExit("the contenders do not compute the same loss")
    return rows


# ---- where the quickstart's time goes ----


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only-steps", action="store_true", help="table 1 alone")
    parser.add_argument("--width", type=int, default=256, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=32, help="a multiple of --group")
    parser.add_argument("--group", type=int, default=4, help="responses to a prompt")
    bounds: dict[str, Any] = {"type": int, "nargs": 2, "metavar": ("LEAST", "MOST")}
    parser.add_argument("--prompts", default=[16, 48], help="tokens of a prompt", **bounds)
    parser.add_argument("--tokens", default=[64, 256], help="of a prompt and a response", **bounds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="of the quickstart, per arm")
    parser.add_argument("--cold-start-steps", type=int, default=240)
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], help="finished runs to take the phases from too"
    )
    parser.add_argument("--json", type=Path, help="write the tables and the machine here")
    return parser.parse_args()


def cost_of_a_step(config: Config, topology: Topology) -> dict[str, Any]:
    """Table 3 for a step after the last one of a finished run: an engine is closed with its run,
    so the run is resumed for it.
    """
    more = override(config, [f"train.num_rollout={config.train.num_rollout + 1}"])
    trainer, found, metrics = Trainer(more, topology), {}, {}
    step = trainer.train_step

    def measured() -> dict[str, float]:
        title = "one whole step of the quickstart, stare arm"
        found.update(runtime_cost(lambda: metrics.update(step() or {}), title))
        return metrics

    trainer.train_step = measured
    trainer.run(Interrupt())
    return found


def main() -> None:
    options = parsed()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="step-") as name, session(Config().policy) as topology:
        folder = Path(name)
        steps, ours = compare_steps(options, topology, folder / "model")
        document = {
            "machine": machine(torch.device("cpu")),
            "options": vars(options),
            "steps": steps,
        }
        if not options.only_steps:
            trainers = quickstart_runs(options, topology, folder)
            runs = {name: trainer.directory for name, trainer in trainers.items()}
            document["phases"] = breakdown(runs | {str(path): path for path in options.runs})
            title = "one score + update of the packed contender"
            resumed = trainers["quickstart, stare"].config
            document["runtime"] = [
                runtime_cost(ours.score_and_update, title),
                cost_of_a_step(resumed, topology),
            ]
    if options.json:
        options.json.write_text(json.dumps(document, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
