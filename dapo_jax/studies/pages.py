"""What pages of studies are made of: Markdown tables and PNG figures."""

import io
from collections.abc import Callable, Sequence

import matplotlib
import matplotlib.figure

from dapo_jax.runtime import plots


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            for row in (heads, ["---"] * len(heads), *rows)]


def png(draw: Callable[[matplotlib.figure.Figure], None], size: tuple[float, float]) -> bytes:
    """The image that `draw` makes of a figure of `size` inches."""
    with matplotlib.rc_context(plots.STYLE):
        figure = matplotlib.figure.Figure(figsize=size, dpi=130, layout="constrained")
        draw(figure)
        image = io.BytesIO()
        figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()
