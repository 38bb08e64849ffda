"""What must hold for every checkpointing system, tested on one: it is put into a toy job, killed and started again."""
