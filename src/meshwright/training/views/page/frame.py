"""Put a page together: one HTML file that fetches nothing, with its style, and a script only where one is given."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

_LONG = re.compile(r"\S{16,}")
_BREAKS = re.compile(r"(?<=[/_=:-])(?=\w)|(?<=\.)(?=[A-Za-z_])")


def framed(title: str, body: Sequence[str], *, script: str = "", data: str = "", refresh: int = 0) -> str:
    """Return a page as text.

    Args:
        title: of the window, without the product's name.
        body: elements as HTML, in order.
        script: JavaScript that may run; everything has to be readable without.
        data: JSON for the script.
        refresh: seconds after which a browser reads the file again; 0: never.
    """
    style = asset("page.css")
    policy = f"default-src 'none'; img-src data:; style-src {_fingerprint(style)}"
    ending = ""
    again = f'<meta http-equiv="refresh" content="{refresh}"/>\n' if refresh else ""
    if script:
        policy += f"; script-src {_fingerprint(script)}"
        # "<" would end the script element; the rest is JSON as it stands
        data = data.replace("<", "\\u003c")
        ending = f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}"/>\n'
        f"{again}"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<title>{escape(title)} ·'
        f" meshwright</title>\n"
        f'<link rel="icon" href="data:,"/>\n<style>{style}</style>\n</head>\n<body>\n{chr(10).join(body)}\n'
        f"{ending}</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """Read a file that comes with the pages."""
    return resources.files("meshwright.training.views.page").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(text: str) -> str:
    """Return the hash by which the browser accepts this text, but nothing that came with the data."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def breakable(text: str) -> str:
    """Return a text as HTML in which long words, such as paths and keys, may go on in the next line at a separator."""
    return "".join(
        "<wbr/>".join(map(escape, _BREAKS.split(word))) if _LONG.fullmatch(word) else escape(word)
        for word in re.split(r"(\s+)", text)
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], changed: Iterable[bool] = (), *, kind: str = "") -> str:
    """Return a table as HTML; rows that are ``changed`` stand out.

    Where the page is narrow, each row becomes a block, and each cell has the title of its column beside it. ``kind`` is
    a class of the style sheet.
    """
    marks, about = iter(changed), f' class="{kind}"' if kind else ""
    labels = [f' data-label="{escape(title)}"' if title else "" for title in head]
    cells = (
        "".join(f"<td{label}>{breakable(cell)}</td>" for label, cell in zip(labels, row, strict=False)) for row in rows
    )
    lines = (f'<tr class="changed">{line}</tr>' if next(marks, False) else f"<tr>{line}</tr>" for line in cells)
    titles = "".join(f"<th>{breakable(title)}</th>" for title in head)
    return f"<table{about}><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def tiles(rows: Iterable[tuple[str, str]]) -> str:
    """Return figures with their names as HTML."""
    return f"<dl>{''.join(f'<div><dt>{escape(name)}</dt><dd>{breakable(text)}</dd></div>' for name, text in rows)}</dl>"


def legend(names: Iterable[tuple[int, str]]) -> str:
    """Return the names of colours as HTML, by (number of the colour, name)."""
    items = "".join(f'<li class="c{number}">{breakable(name)}</li>' for number, name in names)
    return f'<ul class="legend">{items}</ul>'
