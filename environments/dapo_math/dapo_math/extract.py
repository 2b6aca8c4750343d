r"""Finds the answer in a response: the last `\boxed{...}`, else the last `Answer:` line; nothing from thinking counts.

One pass over the text, so that a megabyte of braces costs milliseconds.
"""

import re
from dataclasses import dataclass
from typing import Literal

Problem = Literal["no_answer", "unterminated", "unfinished_think", "hedge"]


@dataclass(frozen=True)
class ParsedAnswer:
    """What a response gives as its answer.

    Args:
        text: the answer as written, or None where there is none to check.
        problem: why there is none: `no_answer`, `unterminated` (the last box never closes), `unfinished_think`, `hedge`
            (two different boxes offered side by side).
        source: where it stood.
        last_line: whether it stood on the last line with text.
    """

    text: str | None
    problem: Problem | None = None
    source: Literal["box", "answer_line"] | None = None
    last_line: bool = False


@dataclass(frozen=True)
class _Box:
    start: int
    content: int
    end: int
    """Position after the closing brace."""


_TOKENS = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"\b(?:answer|答案)[*_` ]{0,4}[:：]", re.IGNORECASE)
_JOINER = re.compile(r"(?:and|or|,|;|/|&|以及|或|和|\s|\$|\\[()\[\],;!]|\\text\{[^{}]{0,12}\})*", re.IGNORECASE)


def parse_answer(response: str, *, prompt_opened_think: bool = False) -> ParsedAnswer:
    """The answer that `response` gives, or why it gives none.

    Args:
        response: the model's whole reply.
        prompt_opened_think: the chat template ended the prompt inside `<think>`, so the reply starts in there.
    """
    text = _after_thinking(response, prompt_opened_think)
    if text is None:
        return ParsedAnswer(None, "unfinished_think")
    boxes = _top_level_boxes(text)
    if boxes is None:
        return ParsedAnswer(None, "unterminated")
    if boxes:
        return _from_boxes(text, boxes)
    return _from_answer_line(text)


def _after_thinking(response: str, opened: bool) -> str | None:
    """The text behind the last closed thought; None where a thought never closes."""
    head, closed, tail = response.rpartition("</think>")
    if not closed:
        return None if opened or "<think>" in response else response
    return None if "<think>" in tail else tail


def _first_box(text: str) -> int | None:
    """Where the first box may begin; braces before it decide nothing, and most of a response stands there."""
    found = [place for place in (text.find("\\boxed"), text.find("\\fbox")) if place >= 0]
    if not found:
        return None
    start = min(found)
    while start and text[start - 1] == "\\":  # in `\\boxed` the first backslash escapes the second
        start -= 1
    return start


def _top_level_boxes(text: str) -> list[_Box] | None:
    """Boxes that stand in no other box, in order; None where one of them never closes."""
    start = _first_box(text)
    if start is None:
        return []
    boxes: list[_Box] = []
    stack: list[tuple[int, int] | None] = []  # (start, content) of an open box, None for a plain brace
    open_boxes = 0
    for match in _TOKENS.finditer(text, start):
        token = match.group()
        if token == "{":
            stack.append(None)
        elif token == "}":
            if stack and (box := stack.pop()):
                open_boxes -= 1
                if not open_boxes:
                    boxes.append(_Box(box[0], box[1], match.end()))
        elif token.endswith("{") and len(token) > 2:
            stack.append((match.start(), match.end()))
            open_boxes += 1
    return None if open_boxes else boxes


def _from_boxes(text: str, boxes: list[_Box]) -> ParsedAnswer:
    last = boxes[-1]
    content = _content(text, last)
    if not content:
        return ParsedAnswer(None, "no_answer")
    for before, after in zip(boxes[-2::-1], boxes[:0:-1], strict=False):
        between = text[before.end : after.start]
        if len(between) > 40 or not _JOINER.fullmatch(between):
            break
        if _content(text, before) != content:
            return ParsedAnswer(content, "hedge", "box")
    return ParsedAnswer(content, None, "box", "\n" not in text[last.end :].rstrip())


def _content(text: str, box: _Box) -> str:
    return text[box.content : box.end - 1].strip()


def _from_answer_line(text: str) -> ParsedAnswer:
    headings = list(_ANSWER_LINE.finditer(text))
    if not headings:
        return ParsedAnswer(None, "no_answer")
    lines = text[headings[-1].end() :].split("\n", 64)
    number, line = next(((i, line) for i, line in enumerate(lines) if line.strip(" \t*_`$")), (0, ""))
    answer = _unwrap(line)
    if not answer or number > 2:  # the answer may follow its heading, not a page later
        return ParsedAnswer(None, "no_answer")
    return ParsedAnswer(answer, None, "answer_line", not "".join(lines[number + 1 :]).strip())


def _unwrap(line: str) -> str:
    """Without Markdown emphasis, sentence end and math delimiters around the whole of it."""
    line = line.strip().strip("*_`").strip()
    line = line.rstrip(".。").strip().strip("*_`").strip()
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = line[len(left) : len(line) - len(right)]
        if len(line) > len(left) + len(right) and line.startswith(left) and line.endswith(right) and left not in inner:
            return inner.strip().rstrip(".").strip()
    return line
