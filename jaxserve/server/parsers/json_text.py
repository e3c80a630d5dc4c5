"""JSON as a model writes it, character by character, into JSON that is valid wherever it ends.

At every moment what came out, and the few characters that ``close`` adds, are a valid JSON text. To that end a comma
and a key are held back until their value begins, an escape until it is whole, and a value of ``true``, ``false`` or
``null`` is written at its first letter. Whitespace between the parts is left out. What models get wrong and what has
only one meaning is put right: line breaks inside strings, unknown escapes, a comma before a bracket, True and None.
Anything else that is not JSON is where the text ends: from there on nothing is taken.
"""

from __future__ import annotations

import json
import re

__all__ = ["JsonText"]

_MAX_DEPTH = 200
_CONSTANTS = {"t": "true", "T": "True", "f": "false", "F": "False", "n": "null", "N": "None"}
_WRITTEN = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_NUMBER = {"-": "[0-9]", "0": r"[.eE]", "1": r"[0-9.eE]", ".": "[0-9]", "f": "[0-9eE]", "e": "[-+0-9]", "s": "[0-9]"}
_NUMBER["x"] = "[0-9]"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')


class JsonText:
    """One JSON value in the making.

    Attributes:
        done: the value is complete; further text is not taken.
        failed: the text was no JSON from here on; further text is not taken.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []
        self._where = "value"
        self._held = ""  # a comma, or a key, for a value that has not begun
        self._escape = ""
        self._high = ""  # the escape of a high surrogate
        self._rest = ""  # of a constant, as it must be spelled
        self._number = ""  # which part of a number was read last
        self._out: list[str] = []

    def push(self, text: str) -> int:
        """Take text; answers how many of its characters belong to the value or to whitespace in it."""
        at = 0
        while at < len(text) and not (self.done or self.failed):
            plain = _PLAIN.match(text, at) if self._in_string and not (self._escape or self._high) else None
            if plain is not None:
                self._write_string(plain[0])
                at = plain.end()
            else:
                at += self._take(text[at])
        return at

    def pull(self) -> str:
        """The JSON that is certain since the last time."""
        pulled = "".join(self._out)
        self._out.clear()
        return pulled

    def close(self) -> str:
        """The JSON that is left, if the text ends here; empty if no value has begun."""
        if not self.done:
            if self._where == "string":
                self._write_string(self._lone_high())
                self._out.append('"')
            elif self._where == "number":
                self._out.append("0" if self._number in "-.es" else "")
            self._out += ["}" if bracket == "{" else "]" for bracket in reversed(self._open)]
            self.done = True
        return self.pull()

    # ------------------------------------------------------------------ one character
    @property
    def _in_string(self) -> bool:
        return self._where in ("string", "key string")

    def _take(self, char: str) -> int:
        """Take a character; 0 if it is to be looked at again, as it ends what stands before."""
        if self._in_string:
            return self._take_in_string(char)
        if self._where == "number":
            return self._take_in_number(char)
        if self._rest:
            self.failed = char != self._rest[0]
            self._rest = self._rest[1:]
            if not self._rest and not self.failed:
                self._end_value()
            return int(not self.failed)
        if char in " \t\r\n":
            return 1
        if char in "}]":
            self._end_bracket(char)
        elif self._where in ("key", "first key"):
            self._begin_key(char)
        elif self._where == "colon":
            self._expect(char == ":", "value")
            self._held += ":"
        elif self._where == "comma":
            self._expect(char == ",", "key" if self._open[-1] == "{" else "value")
            self._held = ","
        else:
            self._begin_value(char)
        return int(not self.failed)

    def _expect(self, right: bool, then: str) -> None:
        self.failed = not right
        self._where = then

    def _begin_key(self, char: str) -> None:
        self._expect(char == '"', "key string")
        self._held += '"'

    def _begin_value(self, char: str) -> None:
        if char in _CONSTANTS:
            spelled = _CONSTANTS[char]
            self._out += [self._held, _WRITTEN[spelled]]
            self._rest = spelled[1:]
        elif char in '{["-' or char in "0123456789":
            self._out += [self._held, char]
            if char in "{[":
                self._open.append(char)
                self._where = "first key" if char == "{" else "value"
                self.failed = len(self._open) > _MAX_DEPTH
            elif char == '"':
                self._where = "string"
            else:
                self._where, self._number = "number", char if char in "-0" else "1"
        else:
            self.failed = True
            return
        self._held = ""

    def _end_bracket(self, char: str) -> None:
        opening = "{" if char == "}" else "["
        ready = ("key", "first key", "comma") if char == "}" else ("value", "comma")
        if not self._open or self._open[-1] != opening or self._where not in ready:
            self.failed = True
            return
        self._open.pop()
        self._held = ""  # a comma before the bracket
        self._out.append(char)
        self._end_value()

    def _end_value(self) -> None:
        self._where = "comma"
        self.done = not self._open

    # ------------------------------------------------------------------ numbers and strings
    def _take_in_number(self, char: str) -> int:
        if re.fullmatch(_NUMBER[self._number], char):
            self._out.append(char)
            after = {"-": "0" if char == "0" else "1", "1": "1", ".": "f", "f": "f"}
            signs = {".": ".", "e": "e", "E": "e", "-": "s", "+": "s"}
            self._number = signs.get(char) or after.get(self._number, "x")
            return 1
        if self._number in "-.es":
            self._out.append("0")
        self.failed = self._number in "-.es" or char in "0123456789+-.eE"
        self._end_value()
        return 0

    def _take_in_string(self, char: str) -> int:
        if self._escape:
            return self._take_in_escape(char)
        if char == "\\":
            self._escape = char
            return 1
        self._write_string(self._lone_high())
        if char == '"':
            if self._where == "key string":
                self._held += char
                self._where = "colon"
            else:
                self._out.append(char)
                self._end_value()
        else:
            self._write_string(json.dumps(char)[1:-1] if char < " " else char)
        return 1

    def _take_in_escape(self, char: str) -> int:
        escape = self._escape
        if escape == "\\" and char in '"\\/bfnrt':
            self._escape = ""
            self._write_string(self._lone_high() + escape + char)
        elif escape == "\\" and char == "u":
            self._escape += char
        elif escape.startswith("\\u") and re.fullmatch("[0-9a-fA-F]", char):
            self._escape += char
            if len(self._escape) == 6:
                self._end_unicode()
        else:  # a backslash that begins no escape stands for itself
            self._escape = ""
            self._write_string(self._lone_high() + "\\\\" + escape[1:])
            return 0
        return 1

    def _end_unicode(self) -> None:
        escape, self._escape = self._escape, ""
        code = int(escape[2:], 16)
        if 0xDC00 <= code < 0xE000:
            self._write_string(self._high + escape if self._high else "\\ufffd")
            self._high = ""
            return
        self._write_string(self._lone_high())
        if 0xD800 <= code < 0xDC00:
            self._high = escape
        else:
            self._write_string(escape)

    def _lone_high(self) -> str:
        """What a high surrogate stands for that no low one follows."""
        lone, self._high = "\\ufffd" if self._high else "", ""
        return lone

    def _write_string(self, text: str) -> None:
        if self._where == "key string":
            self._held += text
        else:
            self._out.append(text)
