"""usage: check.py DIRECTORY. Fails if a page of the built site has a dead link, or loads something from another
host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"audio", "embed", "iframe", "img", "link", "script", "source", "video"}


class Page(HTMLParser):
    """The anchors of a page, and what it links to: (tag, address)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[tuple[str, str]] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add((tag, value))


def faults(site: Path) -> Iterator[str]:
    """One line for each link that leads nowhere and each thing that another host would have to send."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    for path, page in pages.items():
        for tag, address in sorted(page.links):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if tag in LOADS and parts.scheme != "data":
                    yield f"{path.relative_to(site)} loads {address}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.relative_to(site)} links to {address}, which does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)} links to {address}, which has no such anchor"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1]).resolve()))
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    sys.exit(bool(found))
