"""Tables for a terminal or a pipe."""
