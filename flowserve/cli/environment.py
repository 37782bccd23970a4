"""Defaults of options from the environment: FLOWSERVE_HTTP_PORT=9000 is `--http-port 9000`.

Decides the names of the variables, for every long option of every command; the command line wins over them. An option
that may be repeated gets one value from its variable, before those of the command line. Does not know any option. A
variable with that prefix that belongs to no option is reported, since it is probably misspelt; but not those that
Kubernetes sets for a service called flowserve, nor the one that chooses onnxruntime when flowserve is installed. Called
by `main`.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Final

PREFIX: Final = "FLOWSERVE_"
_NO_OPTIONS: Final = re.compile(r"FLOWSERVE_(SERVICE_(HOST|PORT)|PORT($|_\d+_)|ONNXRUNTIME$)")
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"", "0", "false", "no", "off"})


def from_environment(command: argparse.ArgumentParser, environment: Mapping[str, str]) -> list[str]:
    """The arguments of `command` that the environment gives. Ends the program if one is invalid, as a usage error that
    names the variable.
    """
    arguments: list[str] = []
    for action in command._actions:
        option = _long(action)
        value = environment.get(variable_of(option)) if option else None
        if value is None:
            continue
        if action.nargs == 0:
            if value.lower() not in _YES | _NO:
                command.error(f"{variable_of(option)}: expected true or false, got {value!r}")
            arguments += [option] if value.lower() in _YES else []
            continue
        try:
            parsed = action.type(value) if callable(action.type) else value
        except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
            command.error(f"{variable_of(option)}: {error}")
        if action.choices is not None and parsed not in action.choices:
            command.error(
                f"{variable_of(option)}: expected one of {', '.join(map(str, action.choices))}, got {value!r}"
            )
        arguments.append(f"{option}={value}")
    return arguments


def unknown_variables(commands: Iterable[argparse.ArgumentParser], environment: Mapping[str, str]) -> list[str]:
    """A line for each variable with the prefix that is no option's."""
    known = {variable_of(option) for command in commands for action in command._actions if (option := _long(action))}
    lines = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and not _NO_OPTIONS.match(name):
            near = difflib.get_close_matches(name, known, n=1)
            lines.append(f"{name} is no option's variable" + (f"; did you mean {near[0]}?" if near else ""))
    return lines


def variable_of(option: str) -> str:
    """The variable of a long option: `--http-port` has FLOWSERVE_HTTP_PORT."""
    return PREFIX + option.removeprefix("--").replace("-", "_").upper()


def _long(action: argparse.Action) -> str:
    """Its long option; "" for none, and for --help and --version."""
    if isinstance(action, argparse._HelpAction | argparse._VersionAction):
        return ""
    return next((option for option in action.option_strings if option.startswith("--")), "")
