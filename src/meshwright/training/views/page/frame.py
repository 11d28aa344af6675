"""Put a page together: one HTML file that fetches nothing, with its style, and a script only where one is given."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources


def framed(title: str, body: Sequence[str], *, script: str = "", data: str = "") -> str:
    """Return a page as text.

    Args:
        title: of the window, without the product's name.
        body: elements as HTML, in order.
        script: JavaScript that may run; everything has to be readable without.
        data: JSON for the script.
    """
    style = asset("page.css")
    policy = f"default-src 'none'; img-src data:; style-src {_fingerprint(style)}"
    ending = ""
    if script:
        policy += f"; script-src {_fingerprint(script)}"
        # "<" would end the script element; the rest is JSON as it stands
        data = data.replace("<", "\\u003c")
        ending = f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}"/>\n'
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


def table(head: Sequence[str], rows: Iterable[Sequence[str]], changed: Iterable[bool] = ()) -> str:
    """Return a table as HTML; rows that are ``changed`` stand out."""
    marks = iter(changed)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = (f'<tr class="changed">{line}</tr>' if next(marks, False) else f"<tr>{line}</tr>" for line in cells)
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def tiles(rows: Iterable[tuple[str, str]]) -> str:
    """Return figures with their names as HTML."""
    return f"<dl>{''.join(f'<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>' for name, text in rows)}</dl>"


def legend(names: Iterable[tuple[int, str]]) -> str:
    """Return the names of colours as HTML, by (number of the colour, name)."""
    items = "".join(f'<li class="c{number}">{escape(name)}</li>' for number, name in names)
    return f'<ul class="legend">{items}</ul>'
