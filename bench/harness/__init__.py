"""Measures the providers of a case against each other: `case`, `check`, `timer`, `measure`; the machine; the rows of a run."""
