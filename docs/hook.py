"""What MkDocs alone does not do for the site of mkdocs.yml."""

import html
import pathlib
import re

import griffe
from latex2mathml import converter
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
MATH = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>', re.S)


def on_config(config):
    """Adds the pages that the index of results links to the navigation, in order."""
    (results,) = (part["Results"] for part in config.nav if "Results" in part)
    text = (ROOT / "docs" / results[0]).read_text()
    results += [f"results/{page}" for page in re.findall(r"\]\((\w+\.md)\)", text)]
    return config


def on_files(files, config):
    """Adds the pages at the root of the repository."""
    for name, page in {"README": "index", "CHANGELOG": "changelog"}.items():
        text = (ROOT / f"{name}.md").read_text().replace("](docs/", "](")
        files.append(File.generated(config, f"{page}.md", content=text))
    return files


def on_page_content(content, **kwargs):
    """Writes formulas as MathML, which browsers show without a script."""

    def mathml(match):
        display = {"span": "inline", "div": "block"}[match[1]]
        formula = converter.convert(html.unescape(match[2]), display=display)
        return f'<{match[1]} class="math">{formula}</{match[1]}>'

    return MATH.sub(mathml, content)


class Docstrings(griffe.Extension):
    """Converts what docstrings of Keras layers have and Markdown does not."""

    REPLACEMENTS = (
        # In Markdown, `>>>` is a quotation.
        (r"(?:^(?:>>>|\.\.\.) .*\n?)+", r"```pycon\n\g<0>\n```\n"),
        (r"^Call arguments:", "Other Args: Call arguments"),
        (r"\bdocs/([\w/]+\.md)\b", r"[\g<0>](../\1)"),
    )

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            for found, new in self.REPLACEMENTS:
                text = re.sub(found, new, obj.docstring.value, flags=re.M)
                obj.docstring.value = text
