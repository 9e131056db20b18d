"""The commands that scripts start: a master that is a node, a client service, a metadata server."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request

import pytest
from mooncake import cli_client, http_metadata_server
from mooncake.store import MooncakeDistributedStore


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture
def master(tmp_path):
    environment = {**os.environ, "MOONCAKE_MASTER_PROGRAM": os.environ["NODE_PROGRAM"]}
    port, metrics = free_port(), free_port()
    flags = [f"--rpc_port={port}", f"-metrics_port={metrics}", "--enable_http_metadata_server=true", "--http_metadata_server_port=0"]
    flags += ["--eviction_high_watermark_ratio=0.95", f"--data={tmp_path}/data", "--dram=64MiB", "--nvme=0"]
    # The segment outlives its node, as it should: this goes with the test.
    with tempfile.TemporaryDirectory(prefix="tidepool-test-", dir="/dev/shm") as segments:
        flags += [f"--set=dram.folder='{segments}'"]
        command = [sys.executable, "-m", "mooncake.cli", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        yield json.loads(process.stdout.readline())
        process.terminate()
        assert process.wait(30) == 0


def fetch(url, method="GET", body=None):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_master_is_a_node(master):
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", master["metadata"], 1 << 20, 1 << 20, "tcp", "", master["master"]) == 0
    assert store.put("a key", b"value") == 0 and store.get("a key") == b"value"
    admin = f"http://{master['admin']}"
    assert fetch(f"{admin}/get_all_segments")[1].strip()
    assert json.loads(fetch(f"{admin}/health")[1])["service_ready"] is True
    assert fetch(f"{admin}/role") == (200, b"leader")
    assert fetch(f"{admin}/get_all_keys") == (200, b"a key\n")
    assert b"tidepool_" in fetch(f"{admin}/metrics")[1]
    assert fetch(f"{admin}/else")[0] == 404
    store.close()


def test_a_client_service_names_the_master(node):
    import threading

    server = cli_client.serve("127.0.0.1", 0, node.grpc)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store = MooncakeDistributedStore()
    assert store.setup_dummy(64 << 20, 16 << 20, f"127.0.0.1:{server.server_address[1]}") == 0
    address = store.alloc_from_mem_pool(4096)
    assert store.register_buffer(address, 4096) == 0
    assert store.put_from("dummy", address, 4096) == 0
    assert store.get_into("dummy", address, 4096) == 4096
    assert store.close() == 0
    server.shutdown()
    server.server_close()
    assert cli_client.master_of("127.0.0.1:1") is None
    assert cli_client.master_of("nonsense") is None


def test_a_metadata_server_keeps_keys():
    server = http_metadata_server.serve("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.server_address[1]}/metadata"
    assert fetch(f"{url}?key=a")[0] == 404
    assert fetch(f"{url}?key=a", "PUT", b"{}")[0] == 200
    assert fetch(f"{url}?key=a") == (200, b"{}")
    assert fetch(f"{url}?key=a", "PUT", b"[]")[0] == 200
    assert fetch(f"{url}?key=mooncake/rpc_meta/h", "PUT", b"1")[0] == 200
    assert fetch(f"{url}?key=mooncake/rpc_meta/h", "PUT", b"2")[0] == 400
    assert fetch(f"{url}?key=a", "DELETE")[0] == 200
    assert fetch(f"{url}?key=a", "DELETE")[0] == 404
    assert fetch(f"{url}?key=a", "POST", b"")[0] == 405
    assert fetch(url)[0] == 400
    server.shutdown()


@pytest.fixture
def service(node, tmp_path):
    settings = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", "master_server_address": "none:1"}
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "mooncake.mooncake_store_service", f"--config={file}", "--port=0"]
    command += [f"-Dmaster_server_address={node.grpc}", "-D", "global_segment_size=32MB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process.stdout.readline().split()[-1]
    process.terminate()
    assert process.wait(60) == 0


def test_a_store_is_served_by_http(service, store, key):
    def call(path, method="GET", body=None):
        status, said = fetch(f"{service}/{path}", method, None if body is None else json.dumps(body).encode())
        return status, said if path.startswith("get/") and status == 200 else json.loads(said)

    quoted = urllib.parse.quote(f"{key}/é ?", safe="")
    assert call(f"exist/{quoted}") == (200, {"exists": False})
    assert call(f"get/{quoted}") == (404, {"error": "Key not found"})
    assert call("put", "PUT", {"key": f"{key}/é ?", "value": "välue"}) == (200, {"status": "success"})
    assert store.get(f"{key}/é ?") == call(f"get/{quoted}")[1] == "välue".encode()
    assert call(f"exist/{quoted}") == (200, {"exists": True})
    # It was asked about, and has a lease.
    assert call(f"remove/{quoted}", "DELETE") == (500, {"error": "Remove operation failed"})
    assert call("remove_all", "DELETE")[0] == 200 and call(f"get/{quoted}")[0] == 404

    status, mounted = call("mount", "POST", {"size": 32 << 20})
    assert (status, mounted["allocated_size"]) == (200, 32 << 20)
    assert call("unmount", "POST", {"segment_ids": ["none"]})[0] == 500
    assert call("unmount", "POST", {"segment_ids": mounted["segment_ids"]}) == (200, {"status": "success"})
    for path, body in {
        "put": {"key": key},
        "mount": {"size": "32MB"},
        "unmount": {},
        "unmount_local_disk": {"grace_period_seconds": 3601},
        "mount_shm": {"name": "x"},
        "unmount_shm": {"segment_ids": [7]},
        "reconfigure": {"mode": "other"},
    }.items():
        assert call(path, "PUT" if path == "put" else "POST", body)[0] == 400
    for body in ([], "text", None):
        assert call("put", "PUT", body)[0] == 400
    assert fetch(f"{service}/put", "PUT", b"[" * 100_000)[0] == 400
    assert fetch(f"{service}/put", "PUT", b'{"key": "\\ud800", "value": "v"}')[0] == 400
    assert call("mount_shm", "POST", {"name": "x", "size": 4096}) == (500, {"error": "Mount failed, ret=-1012"})
    assert call("reconfigure", "POST", {"mode": "decode", "path": "/x", "size": 1})[0] == 500
    assert call("reconfigure", "POST", {"mode": "Prefill"}) == (200, {"status": "success", "mode": "prefill"})
    for path, method in (("else", "GET"), ("get", "GET"), ("get/", "GET"), ("put/k", "PUT"), ("put", "POST")):
        assert call(path, method, {})[0] == 404
    assert call("exist/%ff")[0] == 400
    address = urllib.parse.urlsplit(service)
    with socket.create_connection((address.hostname, address.port), 10) as connection:
        connection.sendall(b"PUT /api/put HTTP/1.1\r\nHost: h\r\nContent-Length: 999999999999\r\n\r\n")
        assert b" 413 " in connection.makefile("rb").readline()


def test_a_service_without_a_store_gives_up(tmp_path, monkeypatch):
    from mooncake import mooncake_store_service

    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    assert mooncake_store_service.sync_main(["--max-wait-time=0", "-Dglobal_segment_size=0"]) == 1
    for wrong in ("-Dglobal_segment_size=much", "-Dno_such=1", "-Dmaster_server_address=", f"--config={tmp_path}/none"):
        with pytest.raises(SystemExit):
            mooncake_store_service.sync_main([wrong])


def test_versions_are_the_same():
    import mooncake

    import tidepool

    assert mooncake.__version__ == tidepool.__version__
