"""What the suite compares with, each a `CheckpointSystem` of under 150 lines. Imported as `capricorn.baselines`."""
