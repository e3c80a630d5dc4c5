"""Another process that computes for this one, so that what holds Python's lock for long holds another's.

It is started when it is first needed, and again if it has died. Calls go one after the other: a function of a module,
by its name, and bytes; what comes back is pickled. It ends when its input does, so that none outlives its parent.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any, TypeVar

from jaxserve.errors import RequestError
from jaxserve.logging import get_logger

__all__ = ["Helper", "main", "serve"]

_log = get_logger(__name__)

_LIMIT_SECONDS = 120.0
_NICE = 5  # who generates tokens goes first
_LENGTH = struct.Struct("<Q")

Result = TypeVar("Result")


class Helper:
    """One such process. ``context`` (picklable) is the first argument of whatever it calls."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._stop: Callable[[], Any] = lambda: None

    def call(self, function: Callable[[Any, bytes], Result], data: Sequence[bytes]) -> Result:
        """``function(context, data)``, computed there, where the pieces of ``data`` are put together; blocks.

        RequestError: it raised one. RuntimeError: it raised something else, or did not answer within two minutes.
        """
        with self._turn:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _write(process.stdin, [pickle.dumps(function)])
                _write(process.stdin, data)
                if not select.select([process.stdout], [], [], _LIMIT_SECONDS)[0]:
                    raise EOFError(f"it took longer than {_LIMIT_SECONDS:g} s")
                status, *answer = pickle.loads(_read(process.stdout))
            except (OSError, EOFError) as error:
                self._end()
                raise RuntimeError(f"the process that reads large bodies has failed: {error}") from error
        if status == "refused":
            message, param = answer
            raise RequestError(message, param)
        if status == "failed":
            raise RuntimeError(f"the process that reads large bodies has failed:\n{answer[0]}")
        result: Result = answer[0]
        return result

    def close(self) -> None:
        """End the process, and a call that waits for it with RuntimeError; the next call starts another."""
        if (process := self._process) is not None:
            process.kill()  # whose turn it is may be blocked on it for long
        with self._turn:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            self._stop = weakref.finalize(self, _stop, self._process)
            assert self._process.stdin is not None
            _write(self._process.stdin, [pickle.dumps(self._context)])
            _log.info("started a process that reads large bodies")
        return self._process

    def _end(self) -> None:
        self._stop()
        self._process = None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was buffered for it has nowhere to go
                continue
    process.wait()


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """The other process: answer calls until the input ends."""
    context = pickle.loads(_read(source))
    while True:
        try:
            function = pickle.loads(_read(source))
        except EOFError:
            return
        data = _read(source)
        try:
            answer: tuple[Any, ...] = ("done", function(context, data))
        except RequestError as error:
            answer = ("refused", str(error), error.param)
        except Exception:
            answer = ("failed", traceback.format_exc())
        _write(sink, [pickle.dumps(answer)])


def _write(sink: IO[bytes], parts: Sequence[bytes]) -> None:
    sink.write(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        sink.write(part)
    sink.flush()


def _read(source: IO[bytes]) -> bytes:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("it has ended")
    (length,) = _LENGTH.unpack(head)
    data = source.read(length)
    if len(data) < length:
        raise EOFError("it has ended")
    return data


def main() -> None:
    """The other process: calls come by its standard input, answers go by what was its standard output."""
    os.nice(_NICE)
    # A terminal's Ctrl-C reaches it too, while its parent still answers: the end of its input is its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)
