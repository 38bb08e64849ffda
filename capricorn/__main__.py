"""`python -m capricorn` is `capricorn-bench`."""

from capricorn.cli.main import main

main()
