"""The longest time that a test waits for another process."""

PATIENCE = 1800  # seconds: a guard against hangs, which no slow or busy machine comes near
