"""The kinds of value that options take: how each is read, and what completes it in a shell. Starts no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from typing import Any

import rich_click as click
from click.shell_completion import CompletionItem
from click.types import IntParamType, StringParamType

from capricorn.config.cluster import LOCAL
from capricorn.config.fault_kinds import KINDS
from capricorn.config.fault_spec import spelling
from capricorn.config.presets import CLUSTERS, MODELS
from capricorn.config.scenario import ROUTER
from capricorn.config.setting_list import Setting, all_settings, settings_in
from capricorn.systems.registry import SYSTEMS
from capricorn.systems.settings import OPTIONS

Words = Callable[[], Iterable[str]]


class WholeNumber(IntParamType):
    """A whole number that is not too small."""

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = self.least - 1
        if number < self.least:
            self.fail(f"{str(value)!r} is not a whole number, {self.least} or more", param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """A number within bounds, of which infinity and what is no number are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{str(value)!r} is not a finite number", param, ctx)
        return number


class Word(StringParamType):
    """A text, which a shell completes from known words; what it means is found out where it is used."""

    def __init__(self, words: Words, *, is_list: bool = False, may_be_file: bool = False) -> None:
        self.words = words
        self.is_list = is_list
        """Whether the value may be several words with commas between them."""
        self.may_be_file = may_be_file

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",") if self.is_list else ("", "", incomplete)
        found = [CompletionItem(f"{before}{comma}{word}") for word in self.words() if word.startswith(last)]
        return found or ([CompletionItem(incomplete, type="file")] if self.may_be_file else [])


class Assignment(StringParamType):
    """`KEY=VALUE`, of which a shell completes the key, and the value where it is one of a few words."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        key, equals, value = incomplete.partition("=")
        if not equals:
            return [CompletionItem(f"{each.key}=", help=each.description) for each in _settings(key)]
        choices = (choice for each in _settings(key) if each.key == key for choice in each.choices)
        return [CompletionItem(f"{key}={choice}") for choice in choices if choice.startswith(value)]


def _settings(beginning: str) -> Iterator[Setting]:
    settings = (*all_settings(), *(setting for setting, _ in system_settings()))
    return (setting for setting in settings if setting.key.startswith(beginning))


def system_settings() -> list[tuple[Setting, list[str]]]:
    """Returns the options that the built-in systems define, each with the systems that have it."""
    found: dict[str, tuple[Setting, list[str]]] = {}
    for name, entry in SYSTEMS.items():
        model = entry.settings_model()
        for setting in settings_in(OPTIONS, model) if model else ():
            found.setdefault(setting.key, (setting, []))[1].append(name)
    return list(found.values())


def _faults() -> Iterator[str]:
    """Yields the beginning of each kind's spelling, up to where a number is due."""
    return (spelling(kind).partition("=")[0] + "=" for kind in KINDS)


def _loads() -> tuple[str, ...]:
    from capricorn.loads.synthetic import PHASES  # numpy takes a while to import

    return (ROUTER, *PHASES)


SYSTEM_LIST = Word(lambda: SYSTEMS, is_list=True)
KIND_LIST = Word(lambda: KINDS, is_list=True)
KINDS_OF_VALUE: Mapping[str, click.ParamType[Any]] = {
    "SYSTEM": Word(lambda: SYSTEMS, may_be_file=True),
    "MODEL": Word(lambda: MODELS, may_be_file=True),
    "CLUSTER": Word(lambda: (LOCAL, *CLUSTERS), may_be_file=True),
    "LOADS": Word(_loads, may_be_file=True),
    "WHEN": Word(lambda: ("every-iter", "every-", "off")),
    "FAULT": Word(_faults),
    "PATH": Word(lambda: (), may_be_file=True),
    "KEY=VALUE": Assignment(),
    "MIN:MAX": Word(lambda: ()),
}
"""By what stands for the value in the help."""
