"""Elements of SVG and HTML as text. All that comes from outside is escaped here."""

from __future__ import annotations

from html import escape

Attribute = str | float | int


def text(given: object) -> str:
    """Names and keys may hold anything; what no page can show becomes a replacement mark."""
    shown = "".join(
        one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}"
        for one in str(given)
    )
    return escape(shown)


def tag(name: str, *inside: str, **attributes: Attribute) -> str:
    """An element; `inside` is markup already. `class_` is `class`, `text_anchor` `text-anchor`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    body = "".join(inside)
    return f"<{name}{written}>{body}</{name}>" if body else f"<{name}{written}/>"


def _value(value: Attribute) -> str:
    """Pixels need one decimal."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return text(value)


def drawing(width: int, height: int, *inside: str, label: str) -> str:
    return tag(
        "svg",
        *inside,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )
