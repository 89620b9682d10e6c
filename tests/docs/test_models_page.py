"""docs/models.md says what the tables of families and the lists of the tests say."""

from __future__ import annotations

from megatron_stare.policy.huggingface.families import FAMILIES
from tests.paths import ROOT
from tests.policy.conversion import conftest as conversion
from tests.policy.huggingface.test_families import PUBLISHED
from tests.policy.huggingface.test_families_float64 import OPTIONS
from tests.policy.huggingface.test_families_layouts import CASES
from tests.rollout.sglang.test_sglang_families import SERVED
from tests.tiny_models import tiny_config

# Other tests send the weights of these to SGLang servers and compare log-probs.
SERVED_ELSEWHERE = dict.fromkeys(("qwen2", "qwen3", "qwen3_5_text", "qwen3_5_moe_text"), "own code")


def table() -> str:
    float64 = {family.removesuffix("_tied") for family, _ in OPTIONS.values()}
    layouts: dict[str, set[str]] = {}
    for layout, option in CASES:
        layouts.setdefault(OPTIONS[option][0], set()).add(layout)
    converted = {tiny_config(name).model_type for name in conversion.FAMILIES}
    served = SERVED_ELSEWHERE | {
        family: "own code" if native else "transformers' code" for family, _, native in SERVED
    }
    shapes: dict[str, list[str]] = {}
    for name, entry in PUBLISHED.items():
        shapes.setdefault(entry["config"]["model_type"], []).append(name)
    rows = [
        "| `model_type` | models | shapes built | float64 twin | layouts in float64 | conversion | "
        "SGLang on a CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        cells = (f"`{name}`", ", ".join(family.models), ", ".join(shapes.get(name, ["-"])))
        twin, back = ("yes" if name in group else "-" for group in (float64, converted))
        checked = (twin, str(len(layouts[name])), back, served.get(name, "-"))
        rows.append(f"| {' | '.join([*cells, *checked])} |")
    return "\n".join(rows)


def test_the_table_is_up_to_date() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert table() in page, f"the table of docs/models.md must be:\n{table()}"
