"""The generated pages say what the code does now."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["how-it-works.md", "operators.md", "knobs.md",
                                  "../src/terrazzo/__init__.pyi", "../README.md",
                                  "triton-source.md"])
def test_page_is_up_to_date(page):
    module = generator()
    fresh, stored = module.PAGES[page](), (DOCS / page).read_text()
    assert module.comparable(fresh) == module.comparable(stored), "run make docs"
    assert "{{" not in stored


def test_public_names_do_not_hang_on_what_was_imported():
    """Operators that a chip brings along for itself are nobody else's."""
    program = ("import terrazzo.ops.gaps, terrazzo as tz; "
               "assert 'written_with_gaps' not in tz.public.NAMES and 'exp' in tz.public.NAMES")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
