"""One node for most tests; those that stop it start their own."""

import uuid

import pytest
from node import Node

import tidepool


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("node") / "data").start()
    yield node
    node.stop()


@pytest.fixture
def own_node(tmp_path):
    node = Node(tmp_path / "data").start()
    yield node
    node.stop()


@pytest.fixture
def store(node):
    with tidepool.Store.connect(node.grpc) as store:
        yield store


@pytest.fixture
def key():
    """A key that no other test uses."""
    return f"test/{uuid.uuid4()}"
