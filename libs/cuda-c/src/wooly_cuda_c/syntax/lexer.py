"""Splits a text into tokens. It removes comments and ends of lines. A character that starts no token is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from wooly_cuda_c.syntax.errors import CudaSourceError

#: Maximum length of a source, in characters.
MAX_SOURCE: Final = 256 << 10
#: Maximum number of tokens of a source.
MAX_TOKENS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the source.

    Attributes:
        kind: ``name``, ``number``, ``string``, ``char``, ``op`` or ``end``.
        text: the text of the token.
        line: line number.
        glued: whether no space separates it from the token before.
    """

    kind: str
    text: str
    line: int
    glued: bool = False


_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\f\v]+)
    |(?P<newline>\n)
    |(?P<comment>//[^\n]*)
    |(?P<block>/\*)
    |(?P<number>\.?[0-9](?:[eEpP][+-]|[A-Za-z0-9_.])*)
    |(?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
    |(?P<string>"(?:\\[^\n]|[^"\\\n])*")
    |(?P<char>'(?:\\[^\n]|[^'\\\n])+')
    |(?P<op><<<|>>>|<<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\+=|-=|\*=|/=|%=|&=|\|=|\^=|::|\#\#
        |[-+*/%&|^~!<>=?:;,.(){}\[\]\#])
    """,
    re.VERBOSE,
)


def lines_of(text: str) -> list[list[Token]]:
    """Return the tokens of every logical line. A backslash at the end of a line joins it with the next line.

    Raises:
        CudaSourceError: the text is too long, or has a character that starts no token.
    """
    if len(text) > MAX_SOURCE:
        raise CudaSourceError(f"the source has {len(text)} characters, at most {MAX_SOURCE} are allowed", 1)
    found: list[list[Token]] = [[]]
    at, line, count, touched = 0, 1, 0, -1
    while at < len(text):
        if text[at] == "\\" and re.match(r"\\[ \t\r]*\n", text[at : at + 8]):
            at, line = text.index("\n", at) + 1, line + 1
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            raise CudaSourceError(f"{text[at : at + 1]!r} does not start a valid token", line)
        kind, word = str(match.lastgroup), match.group()
        if kind == "block":
            end = text.find("*/", match.end())
            if end < 0:
                raise CudaSourceError("the comment has no end", line)
            line += text.count("\n", at, end)
            at = end + 2
            continue
        glued = match.start() == touched
        at = match.end()
        if kind not in ("space", "comment"):
            touched = at
        if kind == "newline":
            line += 1
            found.append([])
        elif kind not in ("space", "comment"):
            if kind == "name" and word in ("R", "L", "u8") and text[at : at + 1] == '"':
                raise CudaSourceError("raw and wide strings are not supported", line)
            count += 1
            if count > MAX_TOKENS:
                raise CudaSourceError(f"the source has more than {MAX_TOKENS} tokens", line)
            found[-1].append(Token(kind, word, line, glued))
    return found
