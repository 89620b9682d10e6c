"""How a tool's result enters a rollout: as tokens after those that the model sampled, which are
never tokenised again.

The chat template renders it (the text between one assistant turn and the next), or a template of
the user with `{output}`. Special tokens in a result stay text: no tool can end or open a turn.
Invalid Unicode is replaced: tokenizers refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jinja2
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import UserError

_TURN, _OUTPUT = "%turn%", "%output{}%"


class ToolMessages:
    """Renders results for one tokenizer. `response` is the user's template;
    empty: the chat template's role `tool`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, response: str = "") -> None:
        self.tokenizer, self.response = tokenizer, response
        if response and "{output}" not in response:
            raise UserError(
                f"tools.response={response!r} has no {{output}}; write where a tool's result goes"
            )
        self._one_message = False
        if not response:
            # a template without the role is refused now, not in the middle of a run
            self._pieces(1)
            try:
                self._pieces(2)
            except UserError:  # one that takes no second result in a row gets all in one
                self._one_message = True

    def ids(self, outputs: Sequence[str], last_id: int) -> tuple[int, ...]:
        """The tokens that follow a turn which ended with `last_id`, up to the model's next turn."""
        if self._one_message:
            outputs = ["\n\n".join(outputs)]
        outputs = [readable(output) for output in outputs]
        found: list[int] = []
        pieces = self._pieces(len(outputs))
        ended = self.tokenizer.decode([last_id], skip_special_tokens=False)
        if not self.response and pieces[0].startswith(ended):
            pieces[0] = pieces[0].removeprefix(ended)  # the model wrote the end of its turn itself
        for place, piece in enumerate(pieces):
            if piece:
                found += self.tokenizer.encode(piece, add_special_tokens=False)
            if place < len(outputs) and outputs[place]:
                found += self.tokenizer.encode(
                    outputs[place], add_special_tokens=False, split_special_tokens=True
                )
        return tuple(found)

    def _pieces(self, count: int) -> list[str]:
        """The text before, between and after `count` results."""
        if self.response:
            before, after = self.response.split("{output}", 1)
            return [before, *[after + before] * (count - 1), after]
        marks = [_OUTPUT.format(number) for number in range(count)]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _TURN}]
        messages += [{"role": "tool", "content": mark} for mark in marks]
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"the chat template cannot write a tool's result ({str(error).splitlines()[0]}); "
                "set tools.response, for example '<tool_response>{output}</tool_response>'"
            ) from None
        pieces = re.split("|".join(map(re.escape, [_TURN, *marks])), text)
        if len(pieces) != count + 2:
            raise UserError(
                "the chat template leaves out a message of role tool; set tools.response, for "
                "example '<tool_response>{output}</tool_response>'"
            )
        return pieces[1:]


def readable(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
