"""Argument checks that more than one op shares. A message names the argument, its value and what is accepted."""
