"""The parser of the comments beside the fields."""

from __future__ import annotations

from megatron_stare.config import Config
from megatron_stare.config.described import fields, sections


def test_every_field_has_its_type_default_and_comment() -> None:
    found = fields()
    lr, staleness = found["optimizer.lr"], found["rollout.max_staleness"]
    assert (lr.kind, lr.default, lr.limits) == ("float", 1e-6, "0 or more")
    assert staleness.comment.startswith("a rollout with a token older than")
    assert staleness.comment.endswith("taken up in the next step"), "the lines above, joined"
    assert found["policy.fp8"].limits == "none | e4m3 | hybrid"
    assert found["rollout.rollout_top_p"].limits == "above 0 to 1"
    words = found["evaluation.reflection_words"]
    assert words.comment == "counted in responses, in either case", "behind the last of its lines"
    assert "policy.tuning.fp8_recipe" in found, "of a dataclass within a section"
    silent = {key for key, field in found.items() if not field.comment}
    assert not silent, "say what the field is for, above it or behind it"


def test_every_section_is_there() -> None:
    found = sections()
    assert list(found) == list(vars(Config()))
    assert found["tools"].startswith("Multi-turn rollouts") and found["run"] == ""
