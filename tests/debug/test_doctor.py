"""The findings of `doctor` on this machine, and its messages about faults."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_stare import system
from megatron_stare.__main__ import main
from megatron_stare.config import Config, override
from megatron_stare.debug import doctor
from megatron_stare.debug.doctor import TESTED_SGLANG, Finding, examine, print_findings
from megatron_stare.planning import memory
from megatron_stare.recipes import RECIPES
from tests.paths import ROOT
from tests.rollout.sglang.world import make_model
from tests.sync.delta.world import serving, url_of
from tests.tiny_models import tiny_config


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    return {one.what: one.level for one in findings}


def test_the_environment_of_the_tests_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = levels(examine(override(Config(), [f"run.dir={tmp_path}/run"])))
    assert found["python"] == found["torch"] == found["megatron-core"] == "OK"
    assert main(["doctor"]) == int("FAIL" in found.values())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"{list(found.values()).count('FAIL')} FAIL")


@pytest.mark.parametrize("name", [name for name in RECIPES if "grpo" not in name])
def test_recipes_are_examined(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without GPUs and servers nothing else than those, memory and disk may fail."""
    main(["doctor", name, f"run.dir={tmp_path}/run"])
    lines = capsys.readouterr().out.splitlines()
    failed = {line.split()[1].rstrip(":") for line in lines if line.startswith("FAIL")}
    assert failed <= {"CUDA", "SGLang", "disk", "memory"} and lines[-1].endswith(
        f"{len(failed)} FAIL"
    )


def test_versions_outside_the_range_fail_and_others_than_the_tested_warn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"megatron-core": "0.16.1", "torch": "2.99.0", "transformers": None}

    def version(name: str) -> str:
        its = versions.get(name, doctor.pinned_versions().get(name, "999"))
        if its is None:
            raise doctor.metadata.PackageNotFoundError(name)
        return its

    monkeypatch.setattr(doctor.metadata, "version", version)
    found = {one.what: one for one in doctor._packages(Config())}
    assert found["megatron-core"].level == "FAIL" and "==0.19.2" in found["megatron-core"].remedy
    assert found["torch"].level == "WARN" and "is what the tests run" in found["torch"].remedy
    assert found["transformers"].found == "not installed"
    assert found["numpy"].level == "OK"


def test_the_tested_server_is_the_one_that_is_built() -> None:
    pins = (ROOT / "tools/sglang_cpu/requirements.txt").read_text()
    assert f"sglang=={TESTED_SGLANG}\n" in pins


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server that says it is an older one, of the model in tmp_path/served."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = {"version": "0.5.9", "model_path": str(tmp_path / "served")}
            body = json.dumps(said).encode()
            self.send_response(200 if self.path == "/server_info" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as its:
        threading.Thread(target=its.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{its.server_port}"
        its.shutdown()


def test_servers_are_asked(server: str) -> None:
    urls = f"sglang.urls=[{server},http://127.0.0.1:9]"
    config = override(Config(), ["rollout.engine=sglang", urls])
    old, absent = doctor.servers(config)
    assert (old.level, old.found) == ("WARN", "SGLang 0.5.9")
    assert absent.level == "FAIL" and "sglang.urls" in absent.remedy
    nothing = override(Config(), ["rollout.engine=sglang", "sglang.command=/no/such/python"])
    (missing,) = doctor.servers(nothing)
    assert missing.level == "FAIL" and missing.remedy == "correct sglang.command"


def test_a_server_whose_weights_have_another_format_is_named(server: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128}
    model = make_model(tmp_path / "served", "qwen3", **wide)
    settings = ["rollout.engine=sglang", f"sglang.urls=[{server}]", f"policy.hf_checkpoint={model}"]
    (version,) = doctor.servers(override(Config(), settings))
    assert version.found == "SGLang 0.5.9"
    fp8 = ["policy.dtype=bf16", "sglang.weights=fp8_uncorrected", f"run.dir={tmp_path / 'run'}"]
    _, found = doctor.servers(override(Config(), [*settings, *fp8]))
    assert found.level == "FAIL" and "holds no FP8 weights" in found.found
    assert f"--model-path {tmp_path / 'run/servers/fp8_model'}" in found.found


def test_relays_are_asked(server: str, tmp_path: Path) -> None:
    with serving(tmp_path / "relay") as relay:
        relays = f"sglang.relays=[{url_of(relay)},{server}]"
        settings = ("rollout.engine=sglang", "sglang.sync_method=delta", relays)
        *_, there, other = doctor.servers(
            override(Config(), [*settings, f"sglang.urls=[{server}]"])
        )
    assert (there.level, there.found) == ("OK", f"a relay in {tmp_path / 'relay' / 'weights'}")
    assert other.level == "FAIL" and "sglang.relays" in other.remedy


def test_limits_and_directories_are_checked(
    monkeypatch: pytest.MonkeyPatch, small_disk: Path
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (1024, 4096))
    files, locked = doctor._limits(Config())
    assert (files.level, files.remedy, locked.level) == ("WARN", "ulimit -Hn 65536", "OK")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (1024, 1 << 20))
    assert next(iter(doctor._limits(Config()))).level == "OK", "a run raises the first number"
    (disk,) = doctor.disk(override(Config(), [f"run.dir={small_disk}/runs/new"]))
    assert disk.level == "FAIL" and str(small_disk) in disk.found
    large = override(Config(), ["policy.hf_checkpoint=Qwen2.5-32B", f"run.dir={small_disk}"])
    (disk,) = doctor.disk(large)
    # 14 bytes for each of 32.8e9 parameters, in two checkpoints and one that is written
    assert disk.level == "FAIL" and "1,281.5 wanted" in disk.found
    (disk,) = doctor.disk(override(large, ["adapters.rank=32"]))
    # I + O of 64 layers' projections are 8,388,608
    assert "10.5 wanted" in disk.found


@pytest.mark.parametrize(("free", "level"), [(12.1, "OK"), (4.1, "WARN"), (3.9, "FAIL")])
def test_a_small_model_needs_little_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, level: str
) -> None:
    """Three checkpoints of 2 GiB in each of two runs: 4 GiB take the first checkpoints of both."""
    monkeypatch.setattr(memory, "model_bytes", lambda shape: 2 * doctor.GIB / 7)
    usage = SimpleNamespace(free=free * doctor.GIB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage)
    config = override(Config(), ["policy.hf_checkpoint=Qwen2.5-32B", f"run.dir={tmp_path}"])
    (disk,) = doctor.disk(config, runs=2)
    assert (disk.level, disk.found) == (
        level,
        f"{free} GiB free in {tmp_path}, 12.0 wanted for checkpoints",
    )


def test_gpus_that_torch_does_not_see_fail_and_end_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine with an old driver; MEGATRON_STARE_CPU=1 means the CPU."""
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    monkeypatch.setattr(system, "DRIVER_FILE", version)
    monkeypatch.delenv(system.CPU_ON_PURPOSE, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "on_gpu", lambda: False)
    (found,) = doctor._gpus(Config())
    assert found.level == "FAIL" and "550.54.15" in found.found
    assert "580 or newer" in found.remedy
    assert main(["evaluate", "quickstart", f"run.dir={tmp_path}/run"]) == 2
    assert "needs driver 580 or newer" in capsys.readouterr().err
    monkeypatch.setenv(system.CPU_ON_PURPOSE, "1")
    (found,) = doctor._gpus(Config())
    assert found.level == "WARN"


def test_cudnn_with_nan_in_its_backward_fails_on_hopper_alone() -> None:
    hopper = (9, 0)
    assert doctor.cudnn_finding(91700, hopper, False).level == "FAIL"
    assert doctor.cudnn_finding(91900, hopper, False).found == "9.19.0"
    cases = [(91800, hopper, False), (91700, (8, 0), False), (91700, hopper, True)]
    assert {doctor.cudnn_finding(*case).level for case in cases} == {"OK"}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs as torch describes them; a process has left memory on the second one."""
    for name, value in {
        "device_count": 2,
        "current_device": 0,
        "get_device_name": "GPU",
        "get_device_capability": (9, 0),
        "nccl.version": (2, 28, 9),
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: ((1 - gpu) << 30, 1 << 30))
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)
    monkeypatch.setattr(doctor, "on_gpu", lambda: True)


@pytest.mark.usefixtures("two_gpus")
def test_memory_is_looked_at_on_every_gpu_and_by_a_rank_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (memory,) = (one for one in doctor._gpus(Config()) if one.what == "GPU memory")
    assert (memory.level, memory.found) == ("WARN", "GPU 1: 0.0 of 1.0 GiB free")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    (memory,) = (one for one in doctor._gpus(Config()) if one.what == "GPU memory")
    assert (memory.level, memory.found) == ("OK", "GPU 0: 1.0 of 1.0 GiB free")


@pytest.mark.usefixtures("two_gpus")
def test_a_second_cudnn_in_the_process_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to name the version then; seen on the first GPU that ran the kit."""

    def refuses() -> int:
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0)")

    monkeypatch.setattr("torch.backends.cudnn.version", refuses)
    found = {one.what: one for one in doctor._gpus(Config())}
    assert found["cuDNN"].level == "FAIL" and "incompatibility" in found["cuDNN"].found
    assert "CUDNN_HOME" in found["cuDNN"].remedy and found["NCCL"].level == "OK"


def test_missing_kernels_of_delta_nets_are_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU, of a model that has delta nets, unless the run cannot use the kernels."""
    monkeypatch.setattr(doctor, "on_gpu", lambda: True)
    monkeypatch.setattr("megatron_stare.policy.runtime.load_torchs_cudnn", lambda: None)
    for family, options, wanted in (
        ("qwen3_5_text", (), True),
        ("qwen3_5_text", ("policy.deterministic=true",), False),
        ("qwen3", (), False),
    ):
        tiny_config(family).save_pretrained(tmp_path / family)
        config = override(Config(), [f"policy.hf_checkpoint={tmp_path / family}", *options])
        found = {one.what: one for one in doctor._optional(config)}
        assert ("flash-linear-attention" in found) == wanted
        if wanted:
            assert "pip install flash-linear-attention" in found["flash-linear-attention"].remedy


def test_a_finding_is_a_line_and_levels_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("FAIL", "a", "b", "do c"), Finding("OK", "d", "e")]
    assert print_findings(findings) == 1
    lines = ["FAIL a: b; do c", "OK   d: e", "1 OK, 0 WARN, 1 FAIL"]
    assert capsys.readouterr().out.splitlines() == lines
