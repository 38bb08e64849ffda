"""Pure planning: no clock, tensor, network, thread or random state."""
