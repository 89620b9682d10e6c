"""Sampling speed on a CPU: the embedded engine next to transformers.generate and to llama.cpp.

    export OMP_NUM_THREADS=1
    python benchmarks/sampling.py                              random weights in SmolLM2's shape
    python benchmarks/sampling.py --model models/smollm2-135m
    python benchmarks/sampling.py --model models/smollm2-135m --gguf MODEL.gguf --llama PYTHON

Every contender samples the same number of tokens after the same prompts, at temperature 1 from the
whole vocabulary, without stop tokens: groups of 8 responses to one prompt, in one batch. Counted
are processor seconds of the whole process, prompts included; round after round, the fastest counts.
The ratio is to transformers in bf16. llama.cpp runs in its own process, by the package xllamacpp of
the Python that --llama names; one sequence per slot.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import machine, timed
from benchmarks._phases import CONSOLE
from megatron_stare.rollout.embedded import EmbeddedEngine
from megatron_stare.rollout.engine import Request, SamplingParams

GROUP = 8
CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LLAMA = """
import json, sys, threading, time, xllamacpp
prompts, count, file, rounds = json.loads(sys.argv[1])
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_parallel, settings.warmup = file, len(prompts), False
settings.n_ctx, settings.kv_unified, settings.verbosity = 256 * len(prompts), True, 0
for each in (settings.cpuparams, settings.cpuparams_batch):
    each.n_threads, each.poll = 1, 0
server = xllamacpp.Server(settings)
fixed = dict(n_predict=count, ignore_eos=True, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
def ask(seed, prompt):
    answer = server.handle_completions(dict(fixed, prompt=prompt, seed=seed))
    assert answer["tokens_predicted"] == count, answer
for number in range(rounds):
    begun = time.process_time()
    threads = [threading.Thread(target=ask, args=each) for each in enumerate(prompts)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print("seconds", time.process_time() - begun)
"""


def embedded(model: Path, dtype: str, prompts: list[list[int]], count: int) -> Callable[[], None]:
    """Samples once per call."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = EmbeddedEngine(str(model), tokenizer, len(prompts), DTYPES[dtype], CPU)
    engine.stop_ids = frozenset()
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    engine.model.load_state_dict(whole.state_dict())
    engine.version = 0

    def sample() -> None:
        requests = [
            Request(numpy.array(ids, numpy.int32), (0, row // GROUP, row % GROUP))
            for row, ids in enumerate(prompts)
        ]
        futures = engine.submit(requests, SamplingParams(1.0, 1.0, count))
        assert all(future.result().length == count for future in futures)

    return sample


def plain(model: Path, dtype: str, prompts: list[list[int]], count: int) -> Callable[[], None]:
    """transformers.generate; prompts of equal length."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).eval()
    token_BS = torch.tensor(prompts)
    fixed = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    fixed |= {"min_new_tokens": count, "max_new_tokens": count}

    def sample() -> None:
        found = lm.generate(token_BS, attention_mask=torch.ones_like(token_BS), **fixed)
        assert found.shape == (len(prompts), len(prompts[0]) + count)

    return sample


def llama(options: argparse.Namespace, prompts: list[list[int]]) -> float:
    """Processor seconds of the fastest round of llama.cpp."""
    given = json.dumps([prompts, options.tokens, str(options.gguf), options.rounds + 1])
    done = subprocess.run(
        [options.llama, "-c", LLAMA, given], capture_output=True, text=True, check=True
    )
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines() if "seconds" in line]
    return min(seconds[1:])


def random_model(folder: Path) -> Path:
    """SmolLM2-135M's shape with weights of no meaning, and a tokenizer that decodes some ids."""
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    shape |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    config = LlamaConfig(**shape, tie_word_embeddings=True, eos_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a").save_pretrained(folder)
    return folder


def main() -> None:
    options = parsed()
    disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        options.model = Path(options.model or random_model(Path(folder)))
        report(measured(options), options)


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Processor seconds of each sampler's fastest round."""
    generator = torch.Generator().manual_seed(0)
    size = (options.sequences // GROUP, options.prompt)
    vocabulary = AutoModelForCausalLM.from_pretrained(options.model).config.vocab_size
    drawn = torch.randint(3, vocabulary, size, generator=generator).tolist()
    prompts = [ids for ids in drawn for _ in range(GROUP)]
    makers = {"transformers.generate": plain, "embedded engine": embedded}
    contenders = {
        f"{name}, {dtype}": make(options.model, dtype, prompts, options.tokens)
        for name, make in makers.items()
        for dtype in DTYPES
    }
    seconds = dict.fromkeys(contenders, float("inf"))
    for number in range(options.rounds + 1):
        for name, sample in contenders.items():
            _, cpu = timed(sample, CPU)
            seconds[name] = min(seconds[name], cpu) if number else seconds[name]
    if options.gguf:
        seconds[f"llama.cpp, {options.gguf.name}"] = llama(options, prompts)
    return seconds


def report(seconds: dict[str, float], options: argparse.Namespace) -> None:
    """Print the table; write it where --json says."""
    count = options.sequences * options.tokens
    title = f"{options.sequences} responses of {options.tokens} tokens, prompts of {options.prompt}"
    table = Table("sampler", title=title)
    for name in ("CPU s", "tokens per CPU s", "of transformers, bf16"):
        table.add_column(name, justify="right")
    base = seconds["transformers.generate, bf16"]
    for name, each in seconds.items():
        table.add_row(name, f"{each:.1f}", f"{count / each:.0f}", f"{base / each:.2f}")
    CONSOLE.print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(CPU), "cpu_seconds": seconds}))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="Hugging Face directory; empty: random weights")
    parser.add_argument("--sequences", type=int, default=48, help=f"a multiple of {GROUP}")
    parser.add_argument("--prompt", type=int, default=52, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="sampled tokens of a response")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--llama", default=sys.executable, help="Python with xllamacpp")
    parser.add_argument("--json", type=Path, help="write the seconds and the machine here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
