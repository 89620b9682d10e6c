"""`quantize` as a user runs it: what appears in TARGET, what is measured on what,
and one line for every bad input.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip(
    "modelopt", reason="nvidia-modelopt is not installed: pip install 'megatron-stare[quantize]'"
)
pytest.importorskip("scipy", reason="nvidia-modelopt needs scipy")

from transformers import AutoTokenizer, GenerationConfig

from megatron_stare.__main__ import main
from megatron_stare.policy.quantization import load_exported, load_model, measure
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint

PROMPTS = [
    f"{first} and {first * first % 7} make {'what' if first % 2 else 'which number'}?"
    for first in range(20)
]


def write_prompts(path: Path, prompts: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "label": "0"}) + "\n" for prompt in prompts)
    )
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `source`, a checkpoint with tokenizer and sampling defaults,
    and `prompts.jsonl`.
    """
    directory = tmp_path_factory.mktemp("quantize")
    source = write_checkpoint(
        directory / "source", tiny_config("qwen2", vocab_size=257, max_position_embeddings=96)
    )
    config = json.loads((source / "config.json").read_text())  # in the names of transformers 4
    config |= {**config.pop("rope_parameters"), "torch_dtype": config.pop("dtype")}
    del config["rope_type"]
    (source / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(source)
    GenerationConfig(do_sample=True, top_k=20, temperature=0.7, eos_token_id=0).save_pretrained(
        source
    )
    write_prompts(directory / "prompts.jsonl", PROMPTS)
    return directory


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` to spoil."""
    shutil.copytree(made, tmp_path / "here")
    return tmp_path / "here"


def command(place: Path, *more: str) -> list[str]:
    return [
        "quantize",
        str(place / "source"),
        str(place / "target"),
        "--calibration",
        str(place / "prompts.jsonl"),
        *more,
    ]


def test_a_target_holds_weights_tokenizer_and_settings(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command(place)) == 0
    source, target = place / "source", place / "target"
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config")["quant_algo"] == "FP8"
    assert config == json.loads((source / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(target).encode("2 and 4") == byte_tokenizer().encode(
        "2 and 4"
    )
    assert (
        load_file(target / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype
        == torch.float8_e4m3fn
    )
    assert not list(place.glob(".*")), "nothing temporary stays"
    assert (
        len({(target / name).stat().st_mode for name in ("model.safetensors", "config.json")}) == 1
    )

    record = json.loads((target / "quantization.json").read_text())
    ids = [byte_tokenizer().encode(prompt) for prompt in PROMPTS]
    assert record["format"] == "fp8" and record["modelopt"]
    assert record["calibration"]["prompts"] == 15
    assert record["measured_on"] == {
        "prompts": 5,
        "tokens": record["error"]["positions"],
        "held_out": True,
    }
    assert record["calibration"]["tokens"] + record["measured_on"]["tokens"] == sum(map(len, ids))
    order = numpy.random.default_rng(0).permutation(len(ids))
    again = measure(
        load_model(source), load_exported(target), [ids[number] for number in order[:5]]
    )
    assert record["error"] == pytest.approx(vars(again), rel=1e-6), "the error is that of the files"
    shown = capfd.readouterr().out
    assert (
        "measured on 5 prompts held out from calibration" in shown
        and "calibrated on 15 prompts" in shown
    )
    assert f"{again.kl_mean:.3e}" in shown and f"{again.top1_agreement:.2%}" in shown


def test_few_prompts_measure_on_themselves_and_say_so(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_prompts(
        place / "prompts.jsonl", [*PROMPTS[:3], PROMPTS[0]]
    )  # the repeated one is not a fourth
    assert main(command(place, "--format", "int8")) == 0
    record = json.loads((place / "target/quantization.json").read_text())
    assert record["calibration"]["prompts"] == record["measured_on"]["prompts"] == 3
    assert record["measured_on"]["held_out"] is False
    assert "the calibration prompts themselves" in capfd.readouterr().out


def test_options_reach_the_work(place: Path) -> None:
    more = ["--samples", "6", "--held-out", "2", "--response-tokens", "9", "--seed", "3"]
    (place / "target").mkdir()  # an empty directory may be there
    long = write_prompts(place / "prompts.jsonl", [*PROMPTS, "x" * 80])
    assert (
        main(command(place, *more, "data.rollout_max_prompt_len=70", "data.on_bad_row=skip")) == 0
    )
    record = json.loads((place / "target/quantization.json").read_text())
    assert (
        record["calibration"]["file"] == str(long) and record["calibration"]["response_tokens"] == 9
    )
    assert record["calibration"]["prompts"] == 6 and record["measured_on"]["prompts"] == 2
    ids = [byte_tokenizer().encode(prompt) for prompt in PROMPTS]
    order = numpy.random.default_rng(3).permutation(len(ids))
    prompts = sum(len(ids[number]) for number in order[:2])
    assert prompts + 2 <= record["measured_on"]["tokens"] <= prompts + 18


def edit_config(place: Path, **changes: object) -> None:
    path = place / "source/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(place: Path) -> None:
    file = place / "source/model.safetensors"
    file.write_bytes(file.read_bytes()[:9000])


def change_tensors(place: Path, change: str) -> None:
    file = place / "source/model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "fp8":
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    else:
        tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})


BAD = {
    "unknown format": (None, ["--format", "fp9"], "--format fp9 is unknown; did you mean 'fp8'?"),
    "width that groups do not divide": (None, ["--format", "nvfp4"], "do not divide the 44 of"),
    "no samples": (None, ["--samples", "0"], "--samples 0 is out of range"),
    "negative held-out": (None, ["--held-out", "-1"], "--held-out -1 is out of range"),
    "foreign override": (None, ["policy.dtype=bf16"], "does not reach quantize"),
    "unknown override": (None, ["data.input=x"], "unknown key 'data.input'"),
    "no calibration file": (
        lambda p: (p / "prompts.jsonl").unlink(),
        [],
        "does not exist; give a .jsonl",
    ),
    "empty calibration": (lambda p: (p / "prompts.jsonl").write_text(""), [], "no usable row"),
    "unreadable row": (
        lambda p: (p / "prompts.jsonl").write_text("{no\n"),
        [],
        "row 1: is not a JSON object",
    ),
    "one token": (
        lambda p: write_prompts(p / "prompts.jsonl", ["a"]),
        [],
        "no prompt has two tokens",
    ),
    "over the context": (None, ["--response-tokens", "90"], "exceed max_position_embeddings=96"),
    "no directory": (lambda p: shutil.rmtree(p / "source"), [], "no config.json there"),
    "foreign architecture": (
        lambda p: edit_config(p, model_type="gpt2"),
        [],
        "'gpt2' is not supported",
    ),
    "tokenizer over vocabulary": (
        lambda p: (
            edit_config(p, vocab_size=60),
            save_file(
                {
                    n: t[:60] if t.shape[0] == 257 else t
                    for n, t in load_file(p / "source/model.safetensors").items()
                },
                p / "source/model.safetensors",
                metadata={"format": "pt"},
            ),
        ),
        [],
        "over vocab_size=60",
    ),
    "quantised already": (
        lambda p: edit_config(p, quantization_config={"quant_method": "fp8"}),
        [],
        "quantised already",
    ),
    "quantised tensors": (lambda p: change_tensors(p, "fp8"), [], "take the unquantised weights"),
    "truncated weights": (truncate, [], "model.safetensors is damaged"),
    "missing tensor": (lambda p: change_tensors(p, "missing"), [], "down_proj.weight is missing"),
    "not finite": (lambda p: change_tensors(p, "nan"), [], "not finite"),
    "no tokenizer": (
        lambda p: [f.unlink() for f in (p / "source").glob("token*")],
        [],
        "no tokenizer there",
    ),
    "target in use": (
        lambda p: (p / "target").mkdir() or (p / "target/x").touch(),
        [],
        "exists already",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_no_target(
    case: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, more, words = BAD[case]
    if spoil:
        spoil(place)
    before = sorted(place.rglob("*"))
    assert main(command(place, *more)) == 2
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(error) == 1 and words in error[0], error
    assert sorted(place.rglob("*")) == before, "nothing is left behind"


def test_an_unwritable_target_is_refused(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "file").write_text("")
    arguments = command(place)
    arguments[2] = str(place / "file/target")
    assert main(arguments) == 2
    assert "file/target cannot be written (Not a directory)" in capfd.readouterr().err


def test_a_missing_modelopt_is_named(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "modelopt.torch.quantization", None)
    assert main(command(place)) == 2
    assert "pip install 'megatron-stare[quantize]'" in capfd.readouterr().err
