"""Which backend of an operation serves: the one that is asked for, or the first that does not refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

__all__ = ["choose_backend"]


def choose_backend(
    name: str, backends: Iterable[str], refusals: Mapping[str, Callable[[], str | None]], *, what: str, device: str
) -> tuple[str, str]:
    """Name of the backend that will serve ``name`` ("auto" or a backend's own), and why it was taken.

    Args:
        name: what was asked for.
        backends: all there are; "reference" is one of them and serves everything.
        refusals: of the others, in the order in which "auto" tries them: why one cannot serve, or None.
        what: what the operation's backends are called in messages.
        device: name of the device's platform.

    Raises:
        ValueError: there is no such backend, or it refuses; the message says why.
    """
    if name == "auto":
        refused: list[str] = []
        for backend, refuse in refusals.items():
            reason = refuse()
            if reason is None:
                return backend, "; ".join([f"the fastest for {device}", *refused])
            refused.append(f"not {backend}: {reason}")
        return "reference", "; ".join(refused)
    if name not in backends:
        raise ValueError(f"unknown {what} {name!r}; there are: auto, {', '.join(backends)}")
    reason = refusals[name]() if name in refusals else None
    if reason is not None:
        raise ValueError(f"the {what} {name!r} cannot be used: {reason}")
    return name, "asked for"
