"""A template filled in and written, with everything from outside escaped."""

from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from rl_metrics.atomic import write_atomically


def write_page(template: str, path: Path, **content: object) -> None:
    """Write a page atomically; see ``templates/`` for what each template wants."""
    templates = Environment(
        loader=PackageLoader("rl_metrics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template(template).render(version=version("rl-metrics"), **content)
    # a lone surrogate, which a tokenizer can produce, is not UTF-8
    write_atomically(path, page.encode("utf-8", errors="replace"))
