"""What a run leaves: its record, its raw samples, and the files by which launcher and ranks hand things on."""
