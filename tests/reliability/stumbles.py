"""A file system that fails while one file is read."""

import builtins
import io
import os


class Stumbles:
    """Within it the read of ``path`` after ``reads`` of them raises ``error``, as does opening it with ``reads`` of 0."""

    def __init__(self, monkeypatch, path, error, reads=0):
        self._patch, self._path, self._error, self._left, self._open = monkeypatch, path, error, reads, open

    @property
    def happened(self):
        return self._left < 0

    def __enter__(self):
        self._context = self._patch.context()
        patch = self._context.__enter__()
        for module in (builtins, io):
            patch.setattr(module, "open", self._opened)
        return self

    def __exit__(self, *exception):
        self._context.__exit__(*exception)

    def _count(self):
        self._left -= 1
        if self._left < 0:
            raise self._error

    def _opened(self, file, mode="r", *args, **kwargs):
        if not isinstance(file, (str, os.PathLike)) or os.fspath(file) != os.fspath(self._path) or "r" not in mode:
            return self._open(file, mode, *args, **kwargs)
        self._count()
        stumbles = self

        class File(io.FileIO):
            def readinto(self, buffer):
                stumbles._count()
                return super().readinto(buffer)

        return io.BufferedReader(File(file))
