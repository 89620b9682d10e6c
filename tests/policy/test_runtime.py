"""Work before the import of Megatron-Core."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

REPORT = """
import importlib, os, pathlib, sys
from megatron_stare.policy import runtime

def loaded():
    runtime.load_torchs_cudnn()
    return os.environ.get("CUDNN_HOME"), sys.argv[2] in pathlib.Path("/proc/self/maps").read_text()

print(loaded())
package = pathlib.Path(sys.argv[1])
package.mkdir()
(package / "__init__.py").touch()
importlib.invalidate_caches()
runtime.load_torchs_cudnn.cache_clear()
print(loaded())
"""


def test_torchs_cudnn_is_loaded_before_transformer_engine_looks_for_one(tmp_path: Path) -> None:
    """None is loaded without TransformerEngine."""
    library = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn_graph.so.9"
    library.parent.mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    shutil.copy(_ctypes.__file__, library)  # any shared library
    environment = {name: value for name, value in os.environ.items() if name != "CUDNN_HOME"}
    environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    words = ["-c", REPORT, str(tmp_path / "transformer_engine"), str(library)]
    said = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=True
    ).stdout
    expected = [(None, False), (str(library.parents[1]), True)]
    assert said.splitlines() == [str(each) for each in expected]


RELEASE = """
import sys
from megatron_stare.policy import runtime, topology

order, prepare = [], runtime.prepare

class Imports:
    def find_spec(self, name, *_):
        order.append(name)

runtime.prepare = lambda: (order.append("prepared"), prepare())
sys.meta_path.insert(0, Imports())
topology.release_workspaces()
print(order.index("prepared") < order.index("megatron.core"))
"""


def test_megatron_is_prepared_before_workspaces_are_released() -> None:
    """The first import of Megatron-Core brings TransformerEngine, and with it a cuDNN."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", RELEASE], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said == "True\n"
