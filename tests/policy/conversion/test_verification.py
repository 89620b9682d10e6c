"""--verify proves both directions and notices one wrong value."""

from __future__ import annotations

import shutil

from safetensors.torch import load_file, save_file

from megatron_stare.__main__ import main
from megatron_stare.policy.conversion import convert, verification
from tests.policy.conversion.conftest import refused


def weights_of(directory):
    files = map(load_file, directory.glob("*.safetensors"))
    return {name: value for file in files for name, value in file.items()}


def test_verify_proves_both_directions(sources, tmp_path, capsys):
    (tmp_path / "prompts").write_text("one prompt\nand another\n")
    options = ["--verify", "--prompts", str(tmp_path / "prompts")]
    megatron, hf = str(tmp_path / "megatron"), str(tmp_path / "hf")
    assert main(["convert", "hf-to-megatron", str(sources["qwen3"]), megatron, *options]) == 0
    assert main(["convert", "megatron-to-hf", megatron, hf, "--dtype", "bf16", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.count("byte-identical after the round trip") == 2
    assert printed.count("positions of 2 prompts") == 2


def test_verify_takes_no_nan_for_equal(sources, tmp_path, capsys):
    shutil.copytree(sources["qwen3"], tmp_path / "source")
    for file in (tmp_path / "source").glob("*.safetensors"):
        if "model.norm.weight" in (tensors := load_file(file)):
            tensors["model.norm.weight"][3] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})
    command = ["convert", "hf-to-megatron", str(tmp_path / "source"), str(tmp_path / "megatron")]
    assert main([*command, "--verify"]) == 1
    assert "largest difference nan" in capsys.readouterr().out


def test_prompts_that_are_no_text_are_refused(sources, tmp_path, capsys):
    (tmp_path / "prompts").write_bytes("caf\xe9".encode("latin-1"))
    command = ["convert", "hf-to-megatron", str(sources["qwen3"]), str(tmp_path / "megatron")]
    refused(capsys, [*command, "--verify", "--prompts", f"{tmp_path}/prompts"], "UTF-8")
    assert not (tmp_path / "megatron").exists()


def test_the_best_checkpoint_of_a_run_is_a_source(sources, alone, tmp_path):
    """Not the latest one, which the pointer next to it names."""
    checkpoints = tmp_path / "checkpoints"
    for step, model in ((1, "qwen3"), (2, "qwen2")):
        convert.hf_to_megatron(sources[model], checkpoints / f"step_{step:08d}", alone)
    (checkpoints / "latest").write_text("step_00000002")
    (checkpoints / "best").write_text("step_00000001 0.5 eval/a set/avg_at_k")
    source, target = str(checkpoints / "best"), tmp_path / "exported"
    assert main(["convert", "megatron-to-hf", source, str(target)]) == 0
    expected, found = weights_of(sources["qwen3"]), weights_of(target)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(value) for name, value in expected.items())


def test_verify_notices_one_wrong_value(sources, alone, tmp_path):
    convert.hf_to_megatron(sources["qwen3"], tmp_path / "megatron", alone)
    source = tmp_path / "changed"
    shutil.copytree(sources["qwen3"], source)
    file = min(source.glob("*.safetensors"))
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(-1)[3] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    compared, different = verification.compare_tensors(
        source, tmp_path / "megatron", alone, lossy_is_hf=False
    )
    assert different == [name]
    assert compared > 10
