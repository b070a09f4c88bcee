"""A recurrence of each channel by itself: a decaying sum of its inputs."""
