"""Names of types in messages."""


def type_name(value: object) -> str:
    """``list``, ``numpy.ndarray``, ``torch.optim.adamw.AdamW``: the name alone does not tell classes of two packages apart."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
