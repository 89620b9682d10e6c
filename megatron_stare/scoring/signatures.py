"""Reward functions as people write them, recognised by the names of their parameters.

    ours    f(response, label, metadata)                          -> number or Verdict
    verl    f(data_source, solution_str, ground_truth, extra_info)  -> number or {"score": number}
            and the same in the plural, with lists
    TRL     f(completions, prompts, <columns>, **kwargs)          -> [number or None]
    slime   f(args, sample, **kwargs)                             -> number or {"score": number}

A function takes as many of these as it likes, in any order, and may be async. Verifier processes
import this file, so it uses the standard library only.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from megatron_stare.scoring.verdict import unverifiable

EXPECTED = (
    "write f(response, label, metadata), or use the names of verl (data_source, solution_str, "
    "ground_truth, extra_info), TRL (completions, **kwargs) or slime (args, sample)"
)
# Columns under which data sets for TRL keep what is a label here.
_LABELS = ("label", "ground_truth", "answer", "solution", "target")
# Of TRL's own keywords: what only its trainer has.
_OF_TRAINERS = {"completion_ids", "trainer_state", "log_extra", "log_metric"}

# Response, label, metadata and prompt in; the function's result out.
Called = Callable[[str, str, dict[str, Any], str], Any]


class _Arguments:
    """slime's `args`, of which nothing exists here."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name} is a setting of slime; read it from sample.metadata")


def adapted(function: Callable[..., Any]) -> Called:
    """The function as one of response, label, metadata and prompt. ValueError: its parameters are
    of no form above; the message names the expected ones.
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
        call: Called = _Trl(function, by_name, further)
    else:
        found = next((form for form in _FORMS if form.main & _bare(by_name).keys()), None)
        if found is None:
            raise ValueError(f"it has the parameters ({', '.join(parameters)}); {EXPECTED}")
        unknown = {name for name in required if name.lstrip("_") not in found.values}
        call = functools.partial(found, function, by_name)
    if unknown:
        raise ValueError(f"nothing gives its parameter {', '.join(sorted(unknown))}; {EXPECTED}")
    return call


def _bare(names: Mapping[str, Any]) -> dict[str, str]:
    """Names without the underscore of an unused parameter -> the names themselves."""
    return {name.lstrip("_"): name for name in names}


class _Form:
    """One way to write a function of one sample: `values` by the names of its parameters, and the
    names of which one is always there.
    """

    def __init__(self, main: set[str], values: dict[str, Callable[..., Any]]) -> None:
        self.main, self.values = main, values

    def __call__(
        self,
        function: Callable[..., Any],
        names: Mapping[str, Any],
        response: str,
        label: str,
        metadata: dict[str, Any],
        prompt: str,
    ) -> Any:
        sample = SimpleNamespace(
            response=response, label=label, metadata=metadata, prompt=prompt, reward=None
        )
        given = {
            name: self.values[bare](sample)
            for bare, name in _bare(names).items()
            if bare in self.values
        }
        return _one(_finished(function(**given)))


_VERL: dict[str, Callable[[Any], Any]] = {
    "data_source": lambda sample: sample.metadata.get("data_source", ""),
    "solution_str": lambda sample: sample.response,
    "ground_truth": lambda sample: sample.label,
    "extra_info": lambda sample: sample.metadata,
}


def _listed(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda sample: [value(sample)]


_FORMS = (
    _Form(
        {"response"},
        {name: lambda s, name=name: getattr(s, name) for name in ("response", "label", "metadata")},
    ),
    _Form({"solution_str"}, _VERL),
    _Form({"solution_strs"}, {f"{name}s": _listed(value) for name, value in _VERL.items()}),
    _Form({"sample"}, {"args": lambda sample: _Arguments(), "sample": lambda sample: sample}),
)


class _Trl:
    """A function of lists, called with one sample. Columns are the metadata's keys, and the label
    under the usual names that the metadata does not have.

    TRL passes texts or, of conversations, lists of messages. A function that cannot take the text
    (TypeError) is given the messages from then on.
    """

    def __init__(
        self, function: Callable[..., Any], names: Mapping[str, Any], further: bool
    ) -> None:
        self.function, self.names, self.further = function, names, further
        self.messages = False

    def __call__(self, response: str, label: str, metadata: dict[str, Any], prompt: str) -> Any:
        columns = dict.fromkeys(_LABELS, label) | metadata
        given = {name: [value] for name, value in columns.items() if self._takes(name)}
        if self._takes("prompts"):
            given["prompts"] = [prompt]
        if self.messages:
            return self._messages(given, response)
        try:
            return _one(_finished(self.function(completions=[response], **given)))
        except TypeError as error:
            try:
                found = self._messages(given, response)
            except Exception:
                raise error from None
            self.messages = True
            return found

    def _messages(self, given: dict[str, Any], response: str) -> Any:
        message = [{"role": "assistant", "content": response}]
        return _one(_finished(self.function(completions=[message], **given)))

    def _takes(self, name: str) -> bool:
        return name in self.names or (self.further and name.isidentifier())


def _finished(result: Any) -> Any:
    """The result of an async function, once it is there."""
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _one(result: Any) -> Any:
    """The reward of the only sample, out of a list and out of verl's dictionary."""
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    if isinstance(result, dict) and "score" in result:
        result = result["score"]
    if result is None:
        return unverifiable("the reward function returned None for this response")
    return result
