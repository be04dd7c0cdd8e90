"""Additions to the site's configuration: pages from files outside ``docs``, and roles of docstrings as links."""

from __future__ import annotations

import ast
import functools
import logging
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

_ROOT = Path(__file__).parent.parent
_PICTURES = "bench/results"
_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
_ROLE = re.compile(r":(?:class|func|meth|mod):`([^`]+)`")
_PUBLIC = ("amp_kernels", "amp_kernels.nn", "amp_kernels.optim", "amp_kernels.amp")


def on_files(files, config):
    """mkdocs: files of the repository's root that are pages, with their links into ``docs`` as seen from there, and the
    pictures of the benchmarks."""
    for picture in sorted((_ROOT / _PICTURES).glob("**/*.png")):
        name = picture.relative_to(_ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    for page, source in _PAGES.items():
        text = (_ROOT / source).read_text().replace("](docs/", "](").replace("](SECURITY.md)", "](security.md)")
        for place in ("issues", "security") if config.repo_url else ():
            text = text.replace(
                f"the repository's {place} page",
                f"[the repository's {place} page]({config.repo_url.rstrip('/')}/{place})",
            )
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, **_):
    """mkdocs: pictures are next to ``docs`` in the repository, and inside it on the site."""
    return re.sub(rf"\]\(\.\./((?:\.\./)*{_PICTURES}/)", r"](\1", markdown)


def on_page_content(html, page, **_):
    """mkdocs: what a page documents is public. ``mkdocs --strict`` makes a warning an error."""
    for name in re.findall(r'id="(amp_kernels\.[\w.]+)"', html):
        if not is_public(name):
            logging.getLogger("mkdocs").warning("%s documents %s, which is not public", page.file.src_path, name)


def is_public(name: str) -> bool:
    """True of ``room.name`` and of ``room.name.member``: the room exports the name, and the member is no private or special method
    but ``__call__``."""
    room = "amp_kernels"
    rest = name.removeprefix(f"{room}.").split(".")
    while len(rest) > 1 and (_ROOT / room.replace(".", "/") / rest[0] / "__init__.py").exists():
        room = f"{room}.{rest.pop(0)}"
    return rest[0] in _exports(room) and all(not part.startswith("_") or part == "__call__" for part in rest[1:])


@functools.cache
def _exports(room: str) -> list[str]:
    """The ``__all__`` of a package, read and not imported."""
    tree = ast.parse((_ROOT / room.replace(".", "/") / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return []


class Roles(griffe.Extension):
    """Griffe: ``:func:`name``` in a docstring becomes a link if the name is this package's, and code if it is another's.

    A name of this package is a full one, a member of the class it is written in, or public. Modules have no heading to link to.
    """

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        self._package = pkg
        self._visit(pkg)
        # amp_kernels.nn.convert is the function to Python; Griffe finds the module that it is written in, nn/convert.py.
        for room in (pkg["nn"], pkg["amp"]):
            for name, module in list(room.members.items()):
                if module.is_module and name in module.members and not module.members[name].is_alias:
                    for owner in (room, pkg):
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
