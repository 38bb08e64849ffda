"""The command line: click and rich, no measurement logic; one file per command group. Imported as `capricorn.cli`."""
