"""Types of values whose content is not ours to state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""What `json.loads` returns."""
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, or named values that go into one."""
Options: TypeAlias = Mapping[str, Any]
"""Named values that are read and left as they are: a request's options, keyword arguments."""
