"""HTML and SVG elements. A text is escaped wherever it is put, unless it is markup already."""

import html


class Html(str):
    """Markup."""

    __slots__ = ()


Child = Html | str | int | float | None
EMPTY_ELEMENTS = ("br", "meta", "line", "rect", "circle", "polyline", "polygon", "path")


def element(name: str, /, *children: Child, **attributes: str | float | None) -> Html:
    """`class_="x"` is class="x", `stroke_width=1` stroke-width="1"; what is None is left out."""
    shown = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    given = "".join(f' {key}="{html.escape(_text(value))}"' for key, value in shown.items())
    if name in EMPTY_ELEMENTS and not children:
        return Html(f"<{name}{given}/>")
    return Html(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    """One after the other."""
    known = [child for child in children if child is not None]
    return Html("".join(child if isinstance(child, Html) else html.escape(_text(child)) for child in known))


def table(head: list[str], rows: list[list[Child]], numbers_from: int = 1) -> Html:
    """Columns from `numbers_from` on are aligned as numbers."""
    kinds = [None if column < numbers_from else "number" for column in range(len(head))]
    top = element(
        "tr", *(element("th", text, class_=kind, scope="col") for text, kind in zip(head, kinds, strict=True))
    )
    body = [
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    return element("div", element("table", element("thead", top), element("tbody", *body)), class_="scrolls")


def _text(value: Child) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
