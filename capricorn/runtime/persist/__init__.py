"""The persistent tier: plain checkpoint folders on a file system, written beside training and verified."""
