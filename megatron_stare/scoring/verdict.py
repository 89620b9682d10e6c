"""The interface of verifiers: samples, verdicts, and reward functions as people write them, which
are recognised by the names of their parameters.

    of one response:
    ours    f(response, label, metadata, prompt)                  -> number or Verdict
    verl    f(data_source, solution_str, ground_truth, extra_info)  -> number or {"score": number,
            "acc": whether it is right, "pred": its answer}, of which `score` is required
    slime   f(args, sample, **kwargs)                             -> number or {"score": number}

    of a group, all responses to a prompt, -> a list with one of these for each response:
    ours    f(responses, label, metadata, prompt)
    verl    f(data_sources, solution_strs, ground_truths, extra_infos)
    TRL     f(completions, prompts, <columns>, **kwargs)
    slime   f(args, samples, **kwargs)

A function takes as many of these as it likes, in any order, and may be async. Verifier processes
import this file, so it uses the standard library only.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megatron_stare.event_loop import EventLoopThread

VerdictKind = Literal["correct", "wrong", "unverifiable"]


@dataclass(frozen=True)
class Verdict:
    """A verifier's result.

    An unverifiable sample has no value: it is masked out of the loss and left out of its group's
    mean and standard deviation.
    """

    value: float | None  # the reward counts it; in [0, 1] for every built-in verifier
    verdict: VerdictKind
    extracted: str | None = None  # the answer that was judged; None: the response holds none
    parts: dict[str, float] = field(default_factory=dict)  # the verifiers' values in a weighted sum
    # Why it is unverifiable, or wrong without having been read to the end; what a judge wrote.
    reason: str = ""
    kills: int = 0  # verifier processes that this sample cost
    counts: dict[str, float] = field(default_factory=dict)  # what judging cost


@dataclass(frozen=True)
class Sample:
    """One response to judge."""

    response: str
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""  # the problem as text, which remote reward models read
    void: str = ""  # why there is nothing to judge; empty: there is something
    outcome: float | None = None  # reward that the episode itself returned
    # The chat messages that `prompt` was rendered from; empty for a prompt of plain text.
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def group(self) -> tuple[str, str, str]:
        """The values that all responses to one prompt share."""
        return self.prompt, self.label, repr(self.metadata)


def groups_of(samples: Sequence[Sample], grouped: bool = True) -> list[list[int]]:
    """The places of all responses to each prompt, or each sample alone if not `grouped`. A sample
    without a prompt is alone.
    """
    groups: dict[Any, list[int]] = {}
    for place, one in enumerate(samples):
        key = one.group if grouped and one.prompt else place
        groups.setdefault(key, []).append(place)
    return list(groups.values())


Verifier = Callable[[str, str, dict[str, Any]], Verdict | float]


def judged(right: bool, extracted: str | None, reason: str = "") -> Verdict:
    """1 and correct, or 0 and wrong; `reason`: why a response could not be read."""
    return Verdict(float(right), "correct" if right else "wrong", extracted, reason=reason)


def unverifiable(reason: str, extracted: str | None = None, kills: int = 0) -> Verdict:
    """No value: whether the response is right is unknown, for this reason."""
    return Verdict(None, "unverifiable", extracted, reason=reason, kills=kills)


def as_verdict(result: Any) -> Verdict:
    """A Verdict whose value is a finite number, or that has none, as it is; a number as a value,
    right where it is positive; anything else is unverifiable.
    """
    if isinstance(result, Verdict) and result.value is None:
        return result
    given: Any = result.value if isinstance(result, Verdict) else result
    try:
        value = float(given)
    except Exception:  # of an object's __float__, or OverflowError of a huge integer
        return unverifiable(
            f"the verifier returned {type(given).__name__}, neither a number nor a Verdict"
        )
    if not math.isfinite(value):
        return unverifiable(f"the verifier returned {value}")
    if isinstance(result, Verdict):
        return replace(result, value=value)
    return Verdict(value, "correct" if value > 0 else "wrong")


def printable(text: str) -> str:
    """Foreign text for a message: at most 300 characters, without line breaks and escapes."""
    return repr(text[:300])[1:-1]


_announce: list[Callable[[Verdict], None]] = []


def provisionally(verdict: Verdict) -> None:
    """Set the verdict that holds if time or memory runs out from here on. A verifier calls this
    before work whose cost the response alone decides. Outside a verifier process it does nothing.
    """
    for announce in _announce:
        announce(verdict)


def announce_with(announce: Callable[[Verdict], None]) -> None:
    """Connect `provisionally` to the pool; for verifier processes."""
    _announce[:] = [announce]


def in_worker(function: Verifier) -> Verifier:
    """Mark a verifier that may hang, crash or eat memory:
    it runs in the pool, under its deadline and limits.
    """
    function.in_worker = True  # type: ignore[attr-defined]
    return function


EXPECTED = (
    "write f(response, label, metadata) or, of all responses to a prompt, f(responses, label, "
    "metadata), or use the names of verl (data_source, solution_str, ground_truth, extra_info), "
    "TRL (completions, **kwargs) or slime (args, sample)"
)
# Columns under which data sets for TRL keep what is a label here.
_LABELS = ("label", "ground_truth", "answer", "solution", "target")
# Of TRL's own keywords: what only its trainer has.
_OF_TRAINERS = {"completion_ids", "trainer_state", "log_extra", "log_metric"}


class _Arguments:
    """slime's `args`, of which nothing exists here."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name} is a setting of slime; read it from sample.metadata")


@dataclass(frozen=True)
class Called:
    """A reward function as one of samples. `grouped`: it is called with a whole group."""

    call: Callable[[list[Any]], Any]
    grouped: bool

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        """One result per sample. `samples`: a group, or a single sample for a function of one
        response. ValueError: a function of groups returned another number of results.
        """
        # slime's functions may set the reward of their sample
        given = [SimpleNamespace(**vars(sample), reward=None) for sample in samples]
        result = self.call(given)
        if inspect.isawaitable(result):
            result = self._loop.run(_awaited(result))
        if not self.grouped:
            return [_plain(result)]
        if not hasattr(result, "__len__") or len(result) != len(samples):
            found = len(result) if hasattr(result, "__len__") else type(result).__name__
            raise ValueError(f"it returned {found} for {len(samples)} responses; return a list")
        return [_plain(one) for one in result]

    @functools.cached_property
    def _loop(self) -> EventLoopThread:
        """One event loop for all calls: the connections of a client that the function keeps, such
        as AsyncOpenAI, cannot be used in another. In a thread, because a notebook's own has a loop.
        """
        # imported here: asyncio is a third of what a verifier process imports
        from megatron_stare.event_loop import EventLoopThread

        return EventLoopThread("reward")


def adapted(function: Callable[..., Any]) -> Called:
    """The function as one of samples. ValueError: its parameters are of no form above; the message
    names the expected ones.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ValueError(f"its parameters cannot be read; {EXPECTED}") from None
    by_name = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    required = {name for name, p in by_name.items() if p.default is inspect.Parameter.empty}
    required |= {n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY}
    further = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "completions" in by_name:
        unknown = required & _OF_TRAINERS
        called = Called(_Trl(function, by_name, further), grouped=True)
    else:
        found = next((form for form in _FORMS if form.main in _bare(by_name)), None)
        if found is None:
            raise ValueError(f"it has the parameters ({', '.join(parameters)}); {EXPECTED}")
        unknown = {name for name in required if name.lstrip("_") not in found.values}
        called = Called(found.of(function, by_name), found.grouped)
    if unknown:
        raise ValueError(f"nothing gives its parameter {', '.join(sorted(unknown))}; {EXPECTED}")
    return called


def _bare(names: Mapping[str, Any]) -> dict[str, str]:
    """Names without the underscore of an unused parameter -> the names themselves."""
    return {name.lstrip("_"): name for name in names}


@dataclass(frozen=True)
class _Form:
    """One way to write a function: `values`, of the samples, by the names of its parameters, and
    the name which is always there.
    """

    main: str
    values: dict[str, Callable[[list[Any]], Any]]
    grouped: bool = False

    def of(
        self, function: Callable[..., Any], names: Mapping[str, Any]
    ) -> Callable[[list[Any]], Any]:
        taken = {
            name: self.values[bare] for bare, name in _bare(names).items() if bare in self.values
        }
        return lambda samples: function(**{n: value(samples) for n, value in taken.items()})


def _first(value: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    return lambda samples: value(samples[0])


def _listed(value: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    return lambda samples: [value(sample) for sample in samples]


_SHARED = {
    "label": _first(lambda sample: sample.label),
    "metadata": _first(lambda sample: sample.metadata),
    "prompt": _first(lambda sample: sample.prompt),
}
_RESPONSE: Callable[[Any], Any] = lambda sample: sample.response  # noqa: E731
_VERL: dict[str, Callable[[Any], Any]] = {
    "data_source": lambda sample: sample.metadata.get("data_source", ""),
    "solution_str": _RESPONSE,
    "ground_truth": lambda sample: sample.label,
    "extra_info": lambda sample: sample.metadata,
}
_ARGS = {"args": lambda samples: _Arguments()}
_FORMS = (
    _Form("response", {"response": _first(_RESPONSE)} | _SHARED),
    _Form("responses", {"responses": _listed(_RESPONSE)} | _SHARED, grouped=True),
    _Form("solution_str", {name: _first(value) for name, value in _VERL.items()}),
    _Form("solution_strs", {f"{n}s": _listed(value) for n, value in _VERL.items()}, grouped=True),
    _Form("sample", _ARGS | {"sample": lambda samples: samples[0]}),
    _Form("samples", _ARGS | {"samples": lambda samples: samples}, grouped=True),
)


class _Trl:
    """A function of lists. Columns are the metadata's keys, and the label under the usual names
    that the metadata does not have.

    TRL passes texts or, of conversations, lists of messages. A function that cannot take the text
    (TypeError, or IndexError of an empty one) is given messages from then on, prompts included.
    """

    def __init__(
        self, function: Callable[..., Any], names: Mapping[str, Any], further: bool
    ) -> None:
        self.function, self.names, self.further = function, names, further
        self.messages = False

    def __call__(self, samples: list[Any]) -> Any:
        columns = dict.fromkeys(_LABELS, samples[0].label) | samples[0].metadata
        given = {name: [value] * len(samples) for name, value in columns.items()}
        given["prompts"] = [sample.prompt for sample in samples]
        given = {name: column for name, column in given.items() if self._takes(name)}
        if self.messages:
            return self._messages(given, samples)
        try:
            return self.function(completions=[sample.response for sample in samples], **given)
        except (TypeError, IndexError) as error:
            try:
                found = self._messages(given, samples)
            except Exception:
                raise error from None
            self.messages = True
            return found

    def _messages(self, given: dict[str, Any], samples: list[Any]) -> Any:
        if "prompts" in given:
            asked = [one.messages or [{"role": "user", "content": one.prompt}] for one in samples]
            given = given | {"prompts": [list(messages) for messages in asked]}
        said = [[{"role": "assistant", "content": one.response}] for one in samples]
        return self.function(completions=said, **given)

    def _takes(self, name: str) -> bool:
        """Whether the function takes this column of the data set; `completions` is the policy's."""
        taken = name in self.names or (self.further and name.isidentifier())
        return taken and name != "completions"


async def _awaited(result: Any) -> Any:
    return await result


def _plain(result: Any) -> Any:
    """One response's reward, out of a list of one and out of verl's dictionary."""
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    if isinstance(result, dict) and result.get("score") is not None:
        return _of_dictionary(result)
    if result is None:
        return unverifiable("the reward function returned None for this response")
    return result


def _of_dictionary(found: dict[str, Any]) -> Verdict:
    """The verdict of verl's dictionary: `score`, and where it has them `acc`, whether the response
    is right, and `pred`, its answer.
    """
    verdict = as_verdict(found["score"])
    if verdict.value is not None and found.get("acc") is not None:
        verdict = replace(verdict, verdict="correct" if found["acc"] else "wrong")
    answer = found.get("pred")
    return verdict if answer is None else replace(verdict, extracted=str(answer))
