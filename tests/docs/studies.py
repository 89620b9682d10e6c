"""The execution of each command of the studies of SmolLM2-135M."""

from __future__ import annotations

from tests.docs.ways import PYTHON, Elsewhere, Run
from tests.paths import ROOT

UNPACK = "tar -xJf docs/studies/smollm2.tar.xz"
VALID_ARMS = Elsewhere(
    "tests/recipes/test_smollm2.py::test_every_arm_is_valid_and_adapted_ones_only_add_adapters"
)
VARIANTS = " ".join(
    f"runs/smollm2_135m_variants/seed0/stare_{arm}" for arm in ("paper", "adaptive", "2_percent")
)
LCM_LOW = " ".join(f"runs/smollm2_135m_lcm_control/seed{seed}/stare_low" for seed in range(3))
LOW = " ".join(f"runs/smollm2_135m_control/seed{seed}/stare_low" for seed in range(3))
SUMS = " ".join(f"runs/smollm2_135m_losses/seed{seed}/stare" for seed in range(3)) + f" {LOW}"


def _problems(runs: str, arm: str, seeds: int = 3) -> str:
    """The results by problem of an arm's seeds, at T = 1."""
    places = (f"runs/smollm2_135m_{runs}/seed{seed}/{arm}" for seed in range(seeds))
    return " ".join(f"{place}/problems_1.jsonl" for place in places)


STUDIES = {
    **{
        f".venv/bin/{PYTHON} train {words}": Elsewhere(
            "tests/recipes/test_smollm2.py::test_both_arms_train_from_one_cold_start"
        )
        for words in ("smollm2_135m train.num_rollout=150", "smollm2_135m_lcm")
    },
    f".venv/bin/{PYTHON} compare smollm2_135m --losses grpo_ds,stare --seeds 0,1,2 "
    "train.num_rollout=200 run.keep_every=50": Elsewhere(
        "tests/recipes/test_smollm2.py::test_both_arms_train_from_one_cold_start"
    ),
    f".venv/bin/{PYTHON} compare smollm2_135m_lcm --losses grpo_ds,stare --seeds 0,1,2 "
    "train.num_rollout=200 run.keep_every=50": Elsewhere(
        "tests/recipes/test_smollm2.py::test_both_arms_train_from_one_cold_start"
    ),
    f".venv/bin/{PYTHON} evaluate runs/smollm2_135m_lcm_losses/seed1/stare --load step_00000200 "
    "evaluation.per_set.heldout.temperature=1 evaluation.per_set.heldout.n_samples=16": Elsewhere(
        "tests/loop/test_evaluation.py"
    ),
    **{
        f".venv/bin/python benchmarks/paired.py --first {first} --second {second}": Run(
            needs=(UNPACK,)
        )
        for first, second in (
            (_problems("losses", "grpo_ds"), _problems("losses", "stare")),
            (_problems("losses", "grpo_ds"), _problems("control", "stare_low")),
            (_problems("losses", "stare"), _problems("control", "stare_low")),
            (_problems("lcm_losses", "grpo_ds"), _problems("lcm_losses", "stare")),
            (_problems("lcm_losses", "grpo_ds", 2), _problems("lcm_control", "stare_low", 2)),
        )
    },
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_lcm_losses/seed0/grpo_ds "
    "runs/smollm2_135m_lcm_losses/seed0/stare "
    "runs/smollm2_135m_lcm_losses/seed1/grpo_ds runs/smollm2_135m_lcm_losses/seed1/stare "
    "runs/smollm2_135m_lcm_losses/seed2/grpo_ds runs/smollm2_135m_lcm_losses/seed2/stare "
    "--curve entropy,reward,response_length,generation_rounds,signal_fraction": Run(
        needs=(UNPACK,)
    ),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_losses/seed0/grpo_ds "
    "runs/smollm2_135m_losses/seed0/stare runs/smollm2_135m_control/seed0/bonus "
    "runs/smollm2_135m_control/seed0/stare_low --curve entropy,reward,signal_fraction": Run(
        needs=(UNPACK,)
    ),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_losses/seed1/grpo_ds "
    "runs/smollm2_135m_losses/seed1/stare runs/smollm2_135m_control/seed1/stare_low "
    "--curve entropy,reward,signal_fraction": Run(needs=(UNPACK,)),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_losses/seed2/grpo_ds "
    "runs/smollm2_135m_losses/seed2/stare runs/smollm2_135m_control/seed2/stare_low "
    "--curve entropy,reward,signal_fraction": Run(needs=(UNPACK,)),
    f".venv/bin/python benchmarks/study.py {SUMS} --curve weight_w": Run(needs=(UNPACK,)),
    f".venv/bin/python benchmarks/study.py {LOW} runs/smollm2_135m_repo/seed0/repo_r": Run(
        needs=(UNPACK,)
    ),
    f".venv/bin/python benchmarks/entropy_prediction.py --runs {SUMS} "
    "runs/smollm2_135m_lcm_losses/seed0/stare runs/smollm2_135m_lcm_losses/seed1/stare "
    "runs/smollm2_135m_lcm_losses/seed2/stare runs/smollm2_135m_realised/seed2/stare": Run(
        needs=(UNPACK,)
    ),
    f".venv/bin/{PYTHON} compare smollm2_135m --losses stare --seeds 2 train.num_rollout=40 "
    "evaluation.eval_interval=0 diagnostics.realised=true "
    "run.dir=runs/smollm2_135m_realised": VALID_ARMS,
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_losses/seed0/grpo_ds "
    f"{VARIANTS} runs/smollm2_135m_losses/seed0/stare --curve entropy,reward,signal_fraction": Run(
        needs=(UNPACK,)
    ),
    f".venv/bin/python benchmarks/study.py {VARIANTS}": Run(needs=(UNPACK,)),
    f".venv/bin/python benchmarks/study.py {VARIANTS} runs/smollm2_135m_losses/seed0/stare "
    "--curve rising_share_positive,weight_w": Run(needs=(UNPACK,)),
    f".venv/bin/{PYTHON} compare smollm2_135m --losses stare_paper,stare_adaptive,stare_2_percent "
    "--seeds 0 train.num_rollout=75 run.keep_every=25 "
    "run.dir=runs/smollm2_135m_variants": VALID_ARMS,
    f".venv/bin/{PYTHON} compare smollm2_135m --losses stare_paper --seeds 1,2 "
    "train.num_rollout=75 run.keep_every=25 run.dir=runs/smollm2_135m_variants": VALID_ARMS,
    **{
        f".venv/bin/python benchmarks/study.py runs/smollm2_135m_losses/seed{seed}/grpo_ds "
        f"runs/smollm2_135m_variants/seed{seed}/stare_paper "
        f"runs/smollm2_135m_losses/seed{seed}/stare --curve entropy,reward,signal_fraction": Run(
            needs=(UNPACK,)
        )
        for seed in (1, 2)
    },
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_variants/seed1/stare_paper "
    "runs/smollm2_135m_variants/seed2/stare_paper --curve gate,rising_share_positive": Run(
        needs=(UNPACK,)
    ),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_control/seed0/bonus "
    "--curve entropy,entropy_coefficient": Run(needs=(UNPACK,)),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_repo/seed0/repo_r "
    "--curve entropy,reward,zeta": Run(needs=(UNPACK,)),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_lcm_losses/seed1/grpo_ds "
    "--curve skipped": Run(needs=(UNPACK,)),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_lcm_losses/seed2/grpo_ds "
    "runs/smollm2_135m_lcm_losses/seed2/stare --responses gcd": Run(needs=(UNPACK,)),
    f".venv/bin/{PYTHON} compare smollm2_135m --losses stare_low,bonus --seeds 0 "
    "train.num_rollout=150 run.keep_every=50 run.dir=runs/smollm2_135m_control": VALID_ARMS,
    f".venv/bin/{PYTHON} compare smollm2_135m --losses stare_low --seeds 1,2 "
    "train.num_rollout=150 run.keep_every=50 run.dir=runs/smollm2_135m_control": VALID_ARMS,
    f".venv/bin/{PYTHON} compare smollm2_135m_lcm --losses stare_low --seeds 0,1,2 "
    "train.num_rollout=150 run.keep_every=50 run.dir=runs/smollm2_135m_lcm_control": VALID_ARMS,
    f".venv/bin/python benchmarks/study.py {LCM_LOW}": Run(needs=(UNPACK,)),
    f".venv/bin/python benchmarks/study.py {LCM_LOW} --curve entropy,reward,signal_fraction": Run(
        needs=(UNPACK,)
    ),
    f".venv/bin/{PYTHON} compare smollm2_135m --losses repo_r --seeds 0 "
    "train.num_rollout=120 run.keep_every=50 run.dir=runs/smollm2_135m_repo": VALID_ARMS,
    f".venv/bin/{PYTHON} evaluate runs/smollm2_135m_losses/seed0/stare "
    "evaluation.per_set.heldout.temperature=0.6 evaluation.per_set.heldout.n_samples=16": Elsewhere(
        "tests/loop/test_evaluation.py"
    ),
    UNPACK: Run(
        instead=(("docs/studies/smollm2.tar.xz", str(ROOT / "docs/studies/smollm2.tar.xz")),)
    ),
    **{
        f".venv/bin/python benchmarks/study.py {run}/grpo_ds {run}/stare": Run(needs=(UNPACK,))
        for run in (
            "runs/smollm2_135m/seed2",
            "runs/smollm2_135m_lcm/seed0",
            "runs/smollm2_135m_lcm_losses/seed0",
            "runs/smollm2_135m_lcm_losses/seed1",
            "runs/smollm2_135m_lcm_losses/seed2",
            "runs/smollm2_135m_losses/seed0",
            "runs/smollm2_135m_losses/seed1",
            "runs/smollm2_135m_losses/seed2",
        )
    },
    f".venv/bin/{PYTHON} report runs/smollm2_135m_lcm": Run(needs=(UNPACK,)),
    f".venv/bin/{PYTHON} compare smollm2_135m run.dir=runs/smollm2_135m_lora --losses "
    "grpo_ds,grpo_ds_rank1,grpo_ds_rank8,grpo_ds_rank32,grpo_ds_rank8_1x,stare,stare_rank1,"
    "stare_rank8": VALID_ARMS,
    **{
        f".venv/bin/{PYTHON} compare smollm2_135m run.dir=runs/smollm2_135m_apart "
        f"adapters.merge=false --losses {arms}": VALID_ARMS
        for arms in (
            "grpo_ds_rank1,grpo_ds_rank32,grpo_ds_rank1_1x,grpo_ds_rank8_1x,grpo_ds_rank32_1x,"
            "stare_rank32",
            "grpo_ds_rank8,stare_rank8 --seeds 0,1,2",
        )
    },
    f".venv/bin/{PYTHON} evaluate runs/smollm2_135m_apart/seed0/stare_rank8 "
    "evaluation.per_set.heldout.temperature=0.6 evaluation.per_set.heldout.n_samples=16": Elsewhere(
        "tests/loop/test_evaluation.py"
    ),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_apart/seed0/stare_rank8": Run(
        needs=(UNPACK,)
    ),
    f".venv/bin/{PYTHON} convert megatron-to-hf runs/smollm2_135m_lora/seed0/grpo_ds "
    "models/smollm2-135m-grpo": Elsewhere(
        "tests/recipes/test_smollm2.py::test_an_arm_learns_from_the_weights_of_another"
    ),
    f".venv/bin/{PYTHON} compare smollm2_135m run.dir=runs/smollm2_135m_distilled "
    "--losses distilled --seeds 0,1,2": Elsewhere(
        "tests/recipes/test_smollm2.py::test_the_distilled_arm_reads_its_teacher"
    ),
    ".venv/bin/python benchmarks/study.py runs/smollm2_135m_distilled/seed0/distilled "
    "--curve reward,entropy,reference_kl": Run(needs=(UNPACK,)),
}
