"""Options: what a template may be, and what ends an answer."""

from __future__ import annotations

import pytest

from sglang_ext.config import PoolOptions


def test_the_end_of_an_answer_is_rendered_as_demonstrations_are() -> None:
    options = PoolOptions(template="{input}\n{label_prefix}{output}\n{label_prefix}end", separator="--")
    assert options.answer_end == "\nLabel: end--"
    assert options.render("a", "b").endswith("b\nLabel: end")


@pytest.mark.parametrize("template", ["{output} {input}", "{input} {output} {output}", "{input} {output} {input}", "x"])
def test_templates_whose_answer_is_not_last_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match="template"):
        PoolOptions(template=template)
