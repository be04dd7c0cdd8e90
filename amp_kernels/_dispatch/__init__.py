"""The backend of an op: its schema (``library``), the choice of a backend (``policy``), what was built (``load``)."""
