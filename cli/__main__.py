"""`python -m capricorn.cli` is `capricorn-bench`."""

from __future__ import annotations

from .main import main

main()
