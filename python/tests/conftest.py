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
def secret(tmp_path):
    """A file with a secret, as nodes and clients take it."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length, for tests only\n")
    secret.chmod(0o600)
    return secret


@pytest.fixture
def guarded_node(tmp_path, secret):
    """One that asks for the secret."""
    node = Node(tmp_path / "data", more=[f'cluster.secret_file="{secret}"']).start()
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
