"""Certificates: what goes by a node's engine is encrypted, and only for those who have one."""

import subprocess

import pytest
from node import Node

import tidepool


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def files_of(folder, name):
    """A certificate for ``name`` of an authority of its own, as arguments of ``connect``."""
    folder.mkdir()
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}")
    authority, key = folder / "authority.pem", folder / "key.pem"
    openssl(*new, "-x509", "-keyout", folder / "authority.key", "-out", authority, "-days", 2)
    openssl(*new, "-keyout", key, "-out", folder / "request.pem")
    (folder / "names").write_text(f"subjectAltName=DNS:{name}\n")
    signed = ("-CA", authority, "-CAkey", folder / "authority.key", "-CAcreateserial", "-days", 2)
    openssl("x509", "-req", "-in", folder / "request.pem", *signed, "-extfile", folder / "names", "-out", folder / "own.pem")
    key.chmod(0o600)
    return {"tls_certificate": folder / "own.pem", "tls_key": key, "tls_authorities": authority, "tls_name": name}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("tls") / "ours", "pool.test")


@pytest.fixture(scope="module")
def encrypted_node(tmp_path_factory, certificates):
    settings = [f"engine.{field}='{value}'" for field, value in certificates.items()]
    node = Node(tmp_path_factory.mktemp("node") / "data", more=settings).start()
    yield node
    node.stop()


def calls(node, key, **tls):
    value = bytes(range(256)) * 4096
    with tidepool.Store.connect(node.grpc, same_host=False, local_reads=False, **tls) as store:
        assert store.put(key, value) and store.get(key) == value
        return store.native_calls


def test_who_has_a_certificate_uses_the_engine_and_nobody_else(encrypted_node, certificates, key, tmp_path, monkeypatch):
    assert calls(encrypted_node, key, **certificates) > 0
    assert calls(encrypted_node, key + "/none") == 0
    assert calls(encrypted_node, key + "/name", **{**certificates, "tls_name": "other.test"}) == 0
    assert calls(encrypted_node, key + "/stranger", **files_of(tmp_path / "theirs", "pool.test")) == 0
    for argument, value in certificates.items():
        monkeypatch.setenv(f"TIDEPOOL_{argument.upper()}", str(value))
    assert calls(encrypted_node, key + "/environment") > 0


def test_an_instance_has_the_certificates_of_its_store(encrypted_node, certificates, key):
    with tidepool.Store.embedded(encrypted_node.grpc, dram="32MiB", **certificates) as lender:
        assert lender.put(key, b"v" * 100_000)
        with tidepool.Store.connect(lender.address, same_host=False, local_reads=False, **certificates) as store:
            assert store.get(key) == b"v" * 100_000 and store.native_calls > 0
        with tidepool.Store.connect(lender.address, same_host=False, local_reads=False) as store:
            assert store.get(key) == b"v" * 100_000 and store.native_calls == 0


@pytest.mark.parametrize("missing", ["tls_certificate", "tls_key", "tls_authorities"])
def test_certificates_that_can_not_be_used_are_refused(encrypted_node, certificates, missing, tmp_path):
    with pytest.raises(tidepool.InvalidError) as error:
        tidepool.Store.connect(encrypted_node.grpc, **{**certificates, missing: None})
    assert (error.value.reason, error.value.field) == ("BAD_ARGUMENT", missing)
    none = tmp_path / "none"
    for wrong in (none, certificates["tls_certificate"].parent / "names"):
        with pytest.raises(tidepool.InvalidError) as error:
            tidepool.Store.connect(encrypted_node.grpc, **{**certificates, missing: wrong})
        assert error.value.reason == "BAD_CERTIFICATE"
