"""Where an op runs: its schema (``library``), the choice of a backend (``policy``), what was built (``load``)."""
