"""What the site needs beyond its configuration: pages from files outside ``docs``, and roles of docstrings as links."""

from __future__ import annotations

import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

_ROOT = Path(__file__).parent.parent
_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_ROLE = re.compile(r":(?:class|func|meth|mod):`([^`]+)`")
_PUBLIC = ("amp_kernels", "amp_kernels.nn", "amp_kernels.optim", "amp_kernels.amp")


def on_files(files, config):
    """mkdocs: files of the repository's root that are pages, with their links into ``docs`` as seen from there."""
    for page, source in _PAGES.items():
        text = (_ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


class Roles(griffe.Extension):
    """Griffe: ``:func:`name``` in a docstring becomes a link if the name is this package's, and code if it is another's.

    A name of this package is a full one, a member of the class it is written in, or public. Modules have no heading to link to.
    """

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        self._package = pkg
        self._visit(pkg)
        # amp_kernels.nn.convert is the function to Python; Griffe finds the module that it is written in, nn/convert.py.
        for name, module in list(pkg["nn"].members.items()):
            if module.is_module and name in module.members and not module.members[name].is_alias:
                for owner in (pkg["nn"], pkg):
                    if name in owner.members:
                        owner.members[name] = griffe.Alias(name, module.members[name], parent=owner)

    def _visit(self, obj: griffe.Object) -> None:
        if obj.docstring:
            text = _ROLE.sub(lambda role: self._link(role[1], obj), obj.docstring.value)
            obj.docstring.value = re.sub(r"::\n\n(?=    )", ":\n\n", text)
        for member in obj.members.values():
            if not member.is_alias:
                self._visit(member)

    def _link(self, name: str, scope: griffe.Object) -> str:
        if name.startswith("torch.") or name in _PUBLIC:
            return f"`{name}`"
        owner = scope if scope.is_class else scope.parent
        for prefix in ("", f"{owner.path}." if owner else "", *(f"{module}." for module in _PUBLIC)):
            full = prefix + name
            if full.startswith("amp_kernels.") and self._exists(full):
                return f"[`{name}`][{full}]"
        return f"[`{name}`][{name}]"  # unknown: the build says so

    def _exists(self, full: str) -> bool:
        try:
            self._package[full.removeprefix("amp_kernels.")]
        except KeyError:
            return False
        return True
