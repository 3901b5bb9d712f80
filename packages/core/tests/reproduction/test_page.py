"""The HTML page is whole, needs nothing else, and shows what its checkboxes select."""

import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser

import pytest

EMPTY = {"meta", "img", "input", "br", "hr", "link"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Page(HTMLParser):
    """What is in a page: its tags, ids, links, and findings; it must be well formed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links = [], Counter(), [], []
        self.loads, self.shown, self.hidden = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        found = dict(attributes)
        if tag not in EMPTY:
            self.open.append(tag)
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "a":
            self.links.append(found["href"])
        self.loads += [found[name] for name in ("src", "href", "data") if name in found]
        if "data-outcome" in found:
            place = self.hidden if "hidden" in found else self.shown
            place.append((tag, found["data-outcome"], found["data-how"]))

    def handle_startendtag(self, tag, attributes):
        assert tag in EMPTY, tag
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open, f"nothing is open at </{tag}>"
        assert self.open.pop() == tag


@pytest.fixture
def page(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_every_link_has_its_target_and_ids_are_unique(page):
    assert [id for id, count in Counter(page.ids).items() if count > 1] == []
    targets = {f"#{id}" for id in page.ids}
    assert set(page.links) <= targets
    assert {"#p", "#q", "#p.t1", "#q.c2"} <= set(page.links)


def test_the_page_loads_nothing(folder, page):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    images = [load for load in page.loads if not load.startswith("#")]
    assert len(images) == page.tags["img"] == 4
    assert all(load.startswith("data:image/webp;base64,") for load in images)


@pytest.fixture
def opened(folder):
    """Open the page in a browser, at a fragment, and return what its script made of it."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")

    def open_at(fragment):
        command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--user-data-dir={folder.parent / 'browser'}"]
        command += [f"file://{folder / 'report.html'}{fragment}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return Page(done.stdout)

    return open_at


@pytest.mark.parametrize(
    ("fragment", "kept"),
    [
        ("#outcome=differs", {("differs", "other-hardware")}),
        ("#how=scaled-down", {("agrees", "scaled-down"), ("not-attempted", "not-attempted")}),
        ("#outcome=agrees&how=scaled-down,other-hardware", {("agrees", "scaled-down")}),
        ("#outcome=agrees,not-attempted&how=", {("not-attempted", "not-attempted")}),
    ],
)
def test_a_filter_hides_what_it_does_not_select(opened, page, fragment, kept):
    seen = opened(fragment)
    assert {found[1:] for found in seen.shown} == kept
    assert Counter(seen.shown + seen.hidden) == Counter(page.shown)
    assert seen.ids == page.ids
