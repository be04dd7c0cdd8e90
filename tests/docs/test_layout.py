"""The site in a browser of 1280 and of 390 pixels: no line of code and no table is cut."""

import html
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from ..helpers.processes import run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MKDOCS = shutil.which("mkdocs", path=str(Path(sys.executable).parent))
WIDTHS = (1280, 390)

#: Loads each page into a frame of each width, one after the other, and leaves what it measured in its body.
MEASURE = """<!doctype html><body><script>
const found = [], pages = PAGES, widths = WIDTHS;
function name(element) { return element.innerText.trim().split("\\n").map(line => line.trim()).slice(0, 3).join(" / ").slice(0, 90); }
function measure(page, width, view) {
  const say = (what, element, over) => found.push([page, width, what, name(element), over]);
  const root = view.document.documentElement;
  if (root.scrollWidth > width) say("page", view.document.body, root.scrollWidth - width);
  for (const code of view.document.querySelectorAll("pre > code"))
    if (code.clientWidth && code.scrollWidth > code.clientWidth + 1) say("code", code, code.scrollWidth - code.clientWidth);
  for (const table of view.document.querySelectorAll(".md-typeset table:not(.highlighttable)")) {
    const box = table.closest(".md-typeset__scrollwrap") || table.parentElement;
    const over = table.scrollWidth - box.clientWidth;
    if (!box.clientWidth || over <= 1) continue;  // in a closed <details>, or it fits
    const scrolls = ["auto", "scroll"].includes(view.getComputedStyle(box).overflowX);
    if (!scrolls || (width >= 1280 && !table.closest("details"))) say("table", table, over);
  }
}
(async () => {
  for (const width of widths) for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
    const loaded = new Promise(done => frame.onload = done);
    frame.src = page;
    document.body.append(frame);
    await loaded;
    await new Promise(done => setTimeout(done, 100));
    measure(page, width, frame.contentWindow);
    frame.remove();
  }
  document.body.innerText = "measured " + JSON.stringify(found);
})();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if MKDOCS is None:
        pytest.skip("mkdocs is not installed; `make docs` installs it")
    if BROWSER is None:
        pytest.skip("there is no Chromium; Debian's package is chromium")
    folder = tmp_path_factory.mktemp("site")
    repository = "https://example.org/owner/name/"
    run(MKDOCS, "build", "--quiet", "--site-dir", folder, AMP_KERNELS_REPOSITORY=repository)
    return folder


def cut(site, pages):
    """Cut elements: page, width, kind, first words, and by how many pixels."""
    driver = site / "measure.html"
    driver.write_text(MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)))
    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files --dump-dom"
    budget = f"--virtual-time-budget={1000 * len(pages) * len(WIDTHS)}"
    profile = f"--user-data-dir={site / 'profile'}"
    dom = run(BROWSER, *options.split(), budget, profile, "--window-size=1400,1000", driver.as_uri()).stdout
    measured = re.search(r"measured (\[.*\])", dom)
    assert measured, dom[-2000:]
    return json.loads(html.unescape(measured[1]))


@pytest.mark.slow
def test_nothing_is_cut_but_a_long_line_and_a_wide_table(site):
    """Which are planted, to show that the measurement sees them."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 30
    cells = "<td><code>" + "x" * 400 + "</code></td>"
    (site / "wide.html").write_text(
        f"<body class=md-typeset><pre style='width:300px;overflow:auto'><code style='display:block;overflow:auto'>"
        f"{'y' * 400}</code></pre><div style='width:300px'><table><tr>{cells}</tr></table></div>"
    )
    found = cut(site, [*pages, "wide.html"])
    planted = {(width, kind) for page, width, kind, *_ in found if page == "wide.html"}
    assert {(width, kind) for width in WIDTHS for kind in ("code", "table")} <= planted
    assert not [cut for cut in found if cut[0] != "wide.html"]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "place"), [("contributing", "issues"), ("security", "security")])
def test_a_reporter_finds_the_way_by_the_setting_of_the_repository(site, page, place):
    assert f'href="https://example.org/owner/name/{place}"' in (site / f"{page}.html").read_text()
