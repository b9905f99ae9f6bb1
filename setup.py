"""The README of the package index: the one of this folder, with addresses in place of its links to files."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
SOURCE = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]


def readme() -> str:
    """README.md, with links that work anywhere."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{SOURCE}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^\[\]]*\]\()(?!https?:|#)", rf"\1{SOURCE}/blob/main/", text)


setup(long_description=readme(), long_description_content_type="text/markdown")
