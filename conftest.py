"""Runs every Python block of the READMEs and the documentation as a test; sets up hypothesis."""

import os

from hypothesis import settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# No deadline: on shared cores a slow example says nothing. CI repeats the same examples each time.
settings.register_profile("workspace", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("workspace")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["README.md", "docs/*.md"]
).pytest()
