"""The Python of docs/python.md runs as it stands, after the first tutorial's tiny.py."""

from __future__ import annotations

from tests.docs.world import files_of_the_tutorials
from tests.forked import Command
from tests.paths import ROOT

PRINTED = """
assert result.complete and len(result.metrics()) == 5
assert [len(group.rollouts) for group in groups] == [2, 2]
assert all(len(rollout.response_ids) <= 4 for group in groups for rollout in group.rollouts)
assert 0 <= measured.metrics["eval/sums/avg_at_k"] <= 1
assert all(file.is_file() for file in measured.files)
"""


def test_the_page_runs(tmp_path):
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    blocks = [block.partition("\n```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 4
    for name, text in files_of_the_tutorials().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "page.py").write_text("\n".join([*blocks, PRINTED]))
    for script in ("tiny.py", "page.py"):
        command = Command([str(tmp_path / script)], tmp_path / "log.txt", directory=tmp_path)
        assert command.wait(300) == 0, command.output
