"""The machinery systems share: state, store, transport, executor, recovery."""
