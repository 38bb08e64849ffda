"""The system under test: its name, and how it is set up for the test. Knows neither the toy job nor the rules."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from capricorn.config.fields import FrozenModel, Timeout, check, validate
from capricorn.config.own_code import absolute
from capricorn.systems.registry import find, short_name
from capricorn.units import Seconds

CHECK_PREFIX: Final = "capricorn-check-"
"""Of the temporary folder in which a system is tested."""
LARGE: Final = 400_000
"""Numbers in the largest tensor of the toy job."""


class SystemUnderTest(FrozenModel):
    """A system and how it is set up when it is tested."""

    system: str
    options: dict[str, Any] = Field(default_factory=dict)
    """`system.options.KEY` of a scenario, checked by the model of its settings."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that a library reads."""
    has_links: bool = True
    """Whether it sends over links that are modelled in user space; one with sockets of its own cannot."""
    without: tuple[str, ...] = ()
    """Tensors of the toy job that it cannot keep."""
    large: int = LARGE
    timeout_s: Timeout = 5.0
    """Deadline of every wait on a peer."""

    @property
    def patience_s(self) -> Seconds:
        """How long what is closed or has lost its rank may take to end."""
        return 2 * self.timeout_s

    def settings(self) -> Any:
        """Returns an instance of the model of its settings; None if it has none.

        Raises:
            ConfigError: it has no such option, or a value does not fit.
        """
        model = find(self.system).settings_model()
        if model is None:
            check(not self.options, f"system {self} has no options, and so not {', '.join(self.options)}")
            return None
        return validate(model, self.options, f"options of {self}", lax=True)

    def __str__(self) -> str:
        return short_name(self.system)


def under_test(system: str, **changes: Any) -> SystemUnderTest:
    """Sets a system up as it is tested, except for what is changed."""
    name = absolute(system)
    return validate(SystemUnderTest, {"system": name} | dict(find(name).toy) | changes, f"check-system {name}")
