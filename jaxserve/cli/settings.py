"""From parsed arguments to configurations: the flags of an engine, of a server, and of sampling."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from jaxserve.cli.arguments import Flag, add_flags, flags_of, read_yaml
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.errors import ConfigError, RequestError
from jaxserve.sampling_params import SamplingParams

__all__ = [
    "ENGINE_PARTS",
    "add_engine_flags",
    "add_sampling_flags",
    "add_server_flags",
    "configs",
    "given",
    "sampling",
]

ENGINE_PARTS: Sequence[Any] = [part.default_factory for part in fields(EngineConfig)]
"""The dataclasses that make up an engine's configuration."""

_SAMPLING_HELP: Mapping[str, str] = {
    "max_tokens": "Most tokens of an answer.",
    "temperature": "0 is greedy; higher is more random.",
    "top_k": "Sample from the k likeliest tokens; 0 is off.",
    "top_p": "Sample from the likeliest tokens that together reach this probability.",
    "min_p": "Leave out tokens less likely than this share of the likeliest.",
    "presence_penalty": "Penalty for tokens that the answer already has.",
    "frequency_penalty": "Penalty for each time that the answer already has a token.",
    "repetition_penalty": "Factor against tokens of prompt and answer; 1 is off.",
    "stop": "Texts that end the answer.",
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, --config, and a group of flags per part of the engine's configuration."""
    for part in ENGINE_PARTS:
        flags = flags_of(part)
        for flag in flags:
            if flag.name == "model":
                parser.add_argument(
                    "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=flag.help.replace("%", "%%")
                )
        add_flags(parser, part.title, [flag for flag in flags if flag.name != "model"])
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags by name; the command line wins.")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The group of the server's flags."""
    add_flags(parser, ServerConfig.title, flags_of(ServerConfig))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The group of the sampling parameters that matter on a command line; --seed is the engine's."""
    add_flags(parser, "sampling", _sampling_flags())


def configs(args: argparse.Namespace, *, server: bool) -> tuple[EngineConfig, ServerConfig]:
    """The configurations that the command line and the file of --config ask for.

    ConfigError: a value cannot work, or the file holds something else. Without ``server`` it must hold no server flags.
    """
    server_flags = flags_of(ServerConfig) if server else []
    engine_flags = [flag for part in ENGINE_PARTS for flag in flags_of(part)]
    values = read_yaml(args.config, [*engine_flags, *server_flags]) if args.config is not None else {}
    values |= given(args, [*engine_flags, *server_flags])
    of_server = {flag.name: values.pop(flag.name) for flag in server_flags if flag.name in values}
    return EngineConfig.from_flat(values), ServerConfig(**of_server)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters of the command line, by name. ConfigError: one is out of its range."""
    asked = given(args, [*_sampling_flags(), *(flag for flag in flags_of(SamplingParams) if flag.name == "seed")])
    try:
        SamplingParams(**asked)
    except RequestError as error:
        raise ConfigError(str(error), error.param) from None
    return asked


def given(args: argparse.Namespace, flags: Sequence[Flag]) -> dict[str, Any]:
    """Values of those flags that the command line names."""
    found = {flag: getattr(args, flag.name) for flag in flags if hasattr(args, flag.name)}
    return {flag.name: tuple(value) if flag.many else value for flag, value in found.items()}


def _sampling_flags() -> list[Flag]:
    known = {flag.name: flag for flag in flags_of(SamplingParams)}
    return [replace(known[name], help=help) for name, help in _SAMPLING_HELP.items()]
