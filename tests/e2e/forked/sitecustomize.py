"""Has SGLang's processes forked in whatever Python starts with this folder on PYTHONPATH (`tests.conftest`)."""

from tests.e2e.warm import forked_children

forked_children()
