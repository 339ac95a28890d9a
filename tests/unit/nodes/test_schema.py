"""Saved workflows store a node's inputs by position: ids, order, types and defaults may only ever be appended to.

After a deliberate addition call `python3 dev.py test tests/unit/nodes/test_schema.py --update-schema` and commit the snapshot.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fusestream.nodes

SNAPSHOT = Path(__file__).with_name("schema.json")
SCHEMAS = [node.GET_SCHEMA() for node in fusestream.nodes.NODES]


def described() -> dict[str, Any]:
    return {
        schema.node_id: {"inputs": [inputs(i) for i in schema.inputs], "outputs": outputs(schema)} for schema in SCHEMAS
    }


def inputs(item: Any) -> dict[str, Any]:
    found = {"id": item.id, "type": item.get_io_type(), "optional": item.optional}
    if getattr(item, "default", None) is not None:
        found["default"] = item.default
    return found


def outputs(schema: Any) -> list[str]:
    return [output.get_io_type() for output in schema.outputs]


def test_schema_is_the_snapshot(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-schema"):
        SNAPSHOT.write_text(json.dumps(described(), indent=2) + "\n", encoding="utf-8")
    assert described() == json.loads(SNAPSHOT.read_text(encoding="utf-8"))
