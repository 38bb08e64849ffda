"""The one MoE trainer that drives every checkpointing system: models, update, data and loop."""
