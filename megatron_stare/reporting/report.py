"""report.html: one self-contained page per run or comparison, figures inlined,
with what did not hold.

A run directory holds config.yaml and metrics.jsonl. A comparison directory holds summary.json
(`target_entropy`, `runs`, `seeds`, and where known `command` and `caveats`) and one run per arm in
seed<N>/<arm>/.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megatron_stare import config as configuration
from megatron_stare.config import UserError
from megatron_stare.reporting.claims import Finding, check_comparison
from megatron_stare.reporting.intervals import Interval, combine_seeds
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.plots import Run, arm_colours, arm_label, draw_all
from megatron_stare.reporting.summary import summarize_run

SUMMARY_NAME, REPORT_NAME, PLOTS_NAME = "summary.json", "report.html", "plots"

# summary key, label (with {k} for the number of samples), format
ROWS = (
    ("entropy_initial", "Entropy at the first step", ".3f"),
    ("entropy_final", "Entropy, last tenth of the steps", ".3f"),
    ("entropy_in_band_fraction", "Share of the last half in the target band", ".0%"),
    ("train_reward_final", "Training reward, last tenth", ".3f"),
    ("heldout_pass_at_k", "Held-out HARD, pass@{k}", ".3f"),
    ("heldout_avg_at_k", "Held-out HARD, avg@{k}", ".3f"),
    ("easy_avg_at_k", "Held-out EASY, avg@{k}", ".3f"),
    ("length_final", "Response length, last tenth", ".1f"),
    ("steps", "Optimizer steps", ".0f"),
    ("seconds", "Seconds", ".0f"),
    ("seconds_per_step", "Seconds per step", ".3f"),
)
CAPTIONS = {
    "entropy": "Does the policy keep exploring? Below the band it collapses, above it wanders.",
    "evaluation": "Held-out problems. pass@k: at least one of k samples is right; "
    "avg@k: their mean accuracy.",
    "reward": "Over every response that was sampled, before groups without signal are dropped.",
    "length": "Over every response that was sampled.",
    "control": "STARE acts only while the gate is open, and then with the weights W and M.",
}


@dataclass(frozen=True)
class Content:
    """What a page shows; `seeds` is {seed: {arm: {summary key: number}}}."""

    title: str
    runs: Sequence[Run]
    seeds: Mapping[str, Mapping[str, Mapping[str, Any]]]
    target_entropy: float | None
    command: str | None
    findings: Sequence[Finding]
    caveats: Sequence[str]


def write_report(directory: Path, *, command: str | None = None) -> Path:
    """Draw plots/*.png, write report.html into `directory` and return its path.

    `command` overrides the one named in summary.json. Raises UserError where the directory holds
    neither a run nor a comparison.
    """
    directory = Path(directory)
    content = (
        _read_comparison(directory) if (directory / SUMMARY_NAME).exists() else _read_run(directory)
    )
    figures = draw_all(content.runs, directory / PLOTS_NAME, content.target_entropy)
    path = directory / REPORT_NAME
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(_page(content, figures, command or content.command), encoding="utf-8")
    temporary.replace(path)
    return path


def _read_run(directory: Path) -> Content:
    if not (directory / METRICS_NAME).exists():
        raise UserError(
            f"{directory} holds neither {METRICS_NAME} (a run) nor {SUMMARY_NAME} (a comparison)"
        )
    config = configuration.load(directory / "config.yaml")
    arm, seed = config.loss.name, str(config.run.seed)
    target = config.loss.target_entropy
    summary = summarize_run(directory, target)
    return Content(
        title=f"{arm_label(arm)} run",
        runs=[Run(arm, seed, read_metrics(directory / METRICS_NAME))],
        seeds={seed: {arm: summary}},
        target_entropy=target if arm == "stare" else None,
        command=f"python -m megatron_stare train {directory / 'config.yaml'}",
        findings=(),
        caveats=(),
    )


def _read_comparison(directory: Path) -> Content:
    path = directory / SUMMARY_NAME
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        seeds = summary.get("seeds") or {str(summary["seed"]): summary["runs"]}
        target = float(summary["target_entropy"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: {error!r}; it must hold target_entropy, and seeds or seed and runs"
        ) from None
    runs = [
        Run(arm, str(seed), read_metrics(directory / f"seed{seed}" / arm / METRICS_NAME))
        for seed, arms in seeds.items()
        for arm in arms
    ]
    arms = list({run.arm: None for run in runs})
    return Content(
        title=_enumerate([arm_label(arm) for arm in arms]) + " from one start",
        runs=runs,
        seeds=seeds,
        target_entropy=target,
        command=summary.get("command"),
        findings=check_comparison(summary),
        caveats=summary.get("caveats", ()),
    )


def _enumerate(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _page(content: Content, figures: Mapping[str, Path], command: str | None) -> str:
    parts = [
        f"<h1>{escape(content.title)}</h1>",
        f"<p class=lead>{escape(_lead(content))}</p>",
        _figure("entropy", figures["entropy"]),
        _table(content),
        _findings(content.findings, content.caveats),
        *(_figure(name, path) for name, path in figures.items() if name != "entropy"),
        "<h2>Made by</h2>",
        f"<pre>{escape(command or 'the command was not recorded')}</pre>",
    ]
    body = "\n".join(part for part in parts if part)
    return PAGE.format(title=escape(content.title), style=STYLE, body=body)


def _lead(content: Content) -> str:
    combined = combine_seeds(content.seeds)
    seeds = ", ".join(content.seeds)
    clauses = []
    for arm, values in combined.items():
        entropy, solved = values.get("entropy_final"), values.get("heldout_pass_at_k")
        clause = f"{arm_label(arm)} ends at {entropy.mean:.2f} nats" if entropy else arm_label(arm)
        clauses.append(
            clause
            + (f" and solves {solved.mean:.0%} of the held-out HARD problems" if solved else "")
        )
    target = f"Target entropy {content.target_entropy:g}. " if content.target_entropy else ""
    tries = _k(content)
    tail = (
        f", in {tries} tries each"
        if tries and any("solves" in clause for clause in clauses)
        else ""
    )
    return (
        f"{target}{'; '.join(clauses)}{tail}. Seed{'s' if len(content.seeds) > 1 else ''} {seeds}."
    )


def _k(content: Content) -> int | None:
    """The k of avg@k and pass@k, where all runs share it."""
    found: set[Any] = {
        values.get("k") for arms in content.seeds.values() for values in arms.values()
    }
    return int(found.pop()) if len(found) == 1 and None not in found else None


def _table(content: Content) -> str:
    combined = combine_seeds(content.seeds)
    colours = arm_colours(list(combined))
    head = "".join(
        f'<th style="color:{colours[arm]}">{escape(arm_label(arm))}</th>' for arm in combined
    )
    lines = []
    for key, label, spec in ROWS:
        if not any(values.get(key) for values in combined.values()):
            continue
        cells = "".join(
            _cell(content, arm, key, spec, values.get(key)) for arm, values in combined.items()
        )
        lines.append(f"<tr><th>{label.format(k=_k(content) or 'k')}</th>{cells}</tr>")
    several = len(content.seeds) > 1
    note = (
        f"Mean over seeds {', '.join(content.seeds)} with its 95% interval (Student's t); small: "
        "each seed."
    )
    caption = f"<p class=note>{escape(note)}</p>" if several else ""
    return f"<div class=wide><table><tr><th></th>{head}</tr>{''.join(lines)}</table></div>{caption}"


def _cell(content: Content, arm: str, key: str, spec: str, interval: Interval | None) -> str:
    if interval is None:
        return "<td>&ndash;</td>"
    if not interval.half_width:
        return f"<td>{interval.mean:{spec}}</td>"
    each = " / ".join(
        format(arms[arm][key], spec) for arms in content.seeds.values() if arm in arms
    )
    return (
        f"<td>{interval.mean:{spec}} &plusmn; "
        f"{interval.half_width:{spec}}<small>{each}</small></td>"
    )


def _findings(findings: Sequence[Finding], caveats: Sequence[str]) -> str:
    held = [finding.text for finding in findings if finding.held]
    failed = [f"Did not hold. {finding.text}" for finding in findings if not finding.held]
    blocks = []
    if held:
        blocks.append(_list("What held", "held", held))
    if failed or caveats:
        blocks.append(
            _list("What did not hold, and what to keep in mind", "failed", [*failed, *caveats])
        )
    return f"<div class=findings>{''.join(blocks)}</div>" if blocks else ""


def _list(title: str, kind: str, texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<section class={kind}><h2>{title}</h2><ul>{items}</ul></section>"


def _figure(name: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    caption = escape(CAPTIONS.get(name, name))
    image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""

STYLE = """
:root { color: #222; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
main { max-width: 820px; margin: 48px auto; padding: 0 24px }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em }
h2 { font-size: 1.05rem; margin: 0 0 .5rem }
.lead { font-size: 1.1rem; color: #444; margin: 0 0 2rem }
.note, figcaption, small { color: #6b6b6b; font-size: .85rem }
small { display: block; font-weight: 400 }
table { border-collapse: collapse; width: 100%; margin-top: 2.2rem;
  font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .5rem 0 .5rem 1rem; border-bottom: 1px solid #e8e8e8;
  vertical-align: top }
th:first-child { text-align: left; font-weight: 400; padding-left: 0 }
td { white-space: nowrap }
.wide { overflow-x: auto }
.note { margin: .6rem 0 0 }
.findings { margin: 2.5rem 0 }
section { border-left: 3px solid #b8b8b8; padding: .1rem 0 .1rem 1.1rem; margin: 0 0 1.6rem }
section.held { border-color: #009E73 }
section.failed { border-color: #E69F00 }
ul { margin: 0; padding-left: 1.1rem }
li { margin: .25rem 0 }
figure { margin: 2.5rem 0 0 }
figure + h2 { margin-top: 3rem }
img { width: 100%; height: auto; display: block }
figcaption { margin-top: .3rem }
pre { background: #f5f6f7; padding: .9rem 1.1rem; border-radius: 6px; overflow-x: auto;
  font-size: .85rem }
@media print { main { margin: 0 auto } figure { break-inside: avoid } }
"""
