"""Expert loads that are given instead of routed: made up, or from a trace, and dealt out to tokens."""
