"""The longest time that a test waits for another process."""

PATIENCE = 1800  # seconds: detects hangs only; no slow or busy machine comes near
