"""The guard's end, where two causes of it meet."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT

# The process inside has ended, and the directory is being emptied, when the signal of the parent's
# end comes.
CODE = """
import os, signal, sys
from megatron_stare.rollout.sandbox import guard
empty = guard.empty_directory
def signalled_again(directory):
    os.kill(os.getpid(), signal.SIGTERM)
    empty(directory)
guard.empty_directory = signalled_again
child = os.fork()
if not child:
    os._exit(0)
guard._wait_outside(child, sys.argv[1])
"""


def test_a_second_notice_of_the_parents_end_does_not_stop_the_removal(tmp_path):
    left = tmp_path / "directory"
    (left / "inside").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", CODE, str(left)], cwd=ROOT, timeout=60)
    assert done.returncode == 0
    assert not left.exists()
