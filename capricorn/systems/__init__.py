"""The interface of a checkpointing system, and the registry: the one table of facts about systems."""
