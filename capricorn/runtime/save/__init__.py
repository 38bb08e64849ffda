"""One checkpoint on its way: the live state, staged into a slot, sent from there by an executor."""
