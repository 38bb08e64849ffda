"""Where machines meet, as people write it: `HOST:PORT`, with an IPv6 address in brackets or not. Resolves nothing."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

from capricorn.errors import ConfigError

MAX_PORT: Final = 65_535
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_DIGITS_AND_DOTS: Final = re.compile(r"[0-9.]+")


class Endpoint(NamedTuple):
    """A host, by its name or its address without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, option: str) -> Endpoint:
    """Returns the endpoint that is written so.

    Raises:
        ConfigError: it is no host and port; it names the option and the value.
    """
    host, colon, port = text.strip().rpartition(":")
    example = "write it as in node0:29500, 10.0.0.1:29500 or [fd00::1]:29500"
    if not (host and colon and port) or port.endswith("]"):
        raise ConfigError(f"{option} {text!r} is not HOST:PORT; {example}")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise ConfigError(f"{option} {text!r}: {port} is no port; take one from 1 to {MAX_PORT}")
    in_brackets = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if in_brackets else host
    if "%" in host:
        raise ConfigError(
            f"{option} {text!r}: torchrun takes no address with a scope ({host[host.index('%') :]}); "
            "name a global address, or the host by its name"
        )
    if not _is_host(host, is_six=in_brackets or ":" in host):
        raise ConfigError(f"{option} {text!r}: {host!r} is neither an address nor a host name; {example}")
    return Endpoint(host, int(port))


def _is_host(host: str, *, is_six: bool) -> bool:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        # What looks like an IPv4 address and is none is no host name either.
        return not is_six and bool(_HOST_NAME.fullmatch(host)) and not _DIGITS_AND_DOTS.fullmatch(host)
    return version == 6 if is_six else version == 4
