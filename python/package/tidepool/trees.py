"""Trees of tensors: one object for each tensor, and a manifest (JSON) that says how they belong together."""

import base64
import json
from typing import Any, List, Tuple

from ._arguments import key_bytes
from .errors import InvalidError
from .types import Key

_VERSION = 1
DEPTH = 100


def flatten(key: Key, tree: Any) -> Tuple[bytes, List[Tuple[bytes, Any]]]:
    """The manifest, and the tensors with the keys that they go under."""
    base = key_bytes(key)
    tensors: List[Tuple[bytes, Any]] = []

    def walk(node: Any, depth: int) -> Any:
        if depth > DEPTH:
            raise InvalidError(f"a tree is at most {DEPTH} levels deep", "BAD_ARGUMENT", field="tree")
        if node is None or isinstance(node, (bool, int, float, str)):
            return {"value": node}
        if isinstance(node, bytes):
            return {"bytes": base64.b64encode(node).decode()}
        if isinstance(node, dict):
            if not all(isinstance(name, str) for name in node):
                raise TypeError("the names in a tree are str")
            return {"dict": {name: walk(child, depth + 1) for name, child in node.items()}}
        if isinstance(node, (list, tuple)):
            kind = "list" if isinstance(node, list) else "tuple"
            return {kind: [walk(child, depth + 1) for child in node]}
        tensors.append((b"%s/leaf/%d" % (base, len(tensors)), node))
        return {"tensor": len(tensors) - 1}

    root = walk(tree, 0)
    names = [base64.b64encode(name).decode() for name, _ in tensors]
    manifest = {"tidepool_tree": _VERSION, "root": root, "leaves": names}
    return json.dumps(manifest, separators=(",", ":")).encode(), tensors


def leaves(manifest: bytes) -> List[bytes]:
    """The keys of the tensors."""
    return [base64.b64decode(name) for name in _read(manifest)["leaves"]]


def build(manifest: bytes, tensors: List[Any]) -> Any:
    """The tree."""

    def walk(node: Any) -> Any:
        (kind, content), = node.items()
        if kind == "value":
            return content
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "dict":
            return {name: walk(child) for name, child in content.items()}
        if kind == "list":
            return [walk(child) for child in content]
        if kind == "tuple":
            return tuple(walk(child) for child in content)
        return tensors[content]

    return walk(_read(manifest)["root"])


def _read(manifest: bytes) -> dict:
    try:
        decoded = json.loads(manifest)
        version = decoded["tidepool_tree"]
    except (ValueError, KeyError, TypeError):
        raise InvalidError("the object is not a tree", "NOT_A_TREE") from None
    if version != _VERSION:
        raise InvalidError(f"the tree has version {version}, this package reads {_VERSION}", "NOT_A_TREE")
    return decoded
