"""Expert loads from a load source instead of the router, synthetic or from a trace, and the routing they force."""
