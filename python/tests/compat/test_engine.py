"""`mooncake.engine`: codes, and bytes between two processes."""

import subprocess
import sys
import time

import pytest
from mooncake import http_metadata_server
from mooncake.engine import InnerTransferEngine, TransferEngine, TransferNotify, TransferOpcode
from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20


@pytest.fixture
def engine():
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


PEER = """
import ctypes, mmap, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize(sys.argv[1], sys.argv[2], "tcp", "") == 0
memory = mmap.mmap(-1, 8 << 20)
memory[:5] = b"hello"
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.batch_register_memory([address, address + (4 << 20)], [4 << 20, 4 << 20]) == 0
print(engine.get_rpc_port(), address, flush=True)
for line in sys.stdin:
    word = line.split()
    if word[0] == "read":
        print(memory[int(word[1]) : int(word[2])].hex(), flush=True)
    elif word[0] == "notifies":
        print([(notify.name, notify.msg) for notify in engine.get_notifies()], flush=True)
    elif word[0] == "unregister":
        print(engine.batch_unregister_memory([address, address + (4 << 20)]), flush=True)
    elif word[0] == "register":
        print(engine.register_memory(address, 8 << 20), flush=True)
"""


class Peer:
    def __init__(self, host="127.0.0.1", metadata="P2PHANDSHAKE"):
        command = [sys.executable, "-c", PEER, host, metadata]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        port, address = self.process.stdout.readline().split()
        self.session, self.address = f"127.0.0.1:{port}", int(address)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.process.kill()
    peer.process.wait()


def test_bytes_go_to_a_peer_and_back(engine, peer, memory):
    here = memory(8 * MIB, b"w" * 100)
    assert engine.register_memory(here.address, 8 * MIB) == 0
    assert engine.transfer_sync_read(peer.session, here.address + MIB, peer.address, 5) == 0
    assert here[MIB : MIB + 5] == b"hello"
    assert engine.transfer_sync_write(peer.session, here.address, peer.address + 50, 100) == 0
    assert peer.ask("read 50 150") == (b"w" * 100).hex()
    count = 3000
    sources = [here.address + 7 * place for place in range(count)]
    targets = [peer.address + 4 * MIB + 8 * place for place in range(count)]
    here[: 8 * count] = bytes(place % 251 for place in range(8 * count))
    assert engine.batch_transfer_sync_write(peer.session, sources, targets, [7] * count) == 0
    assert engine.batch_transfer_sync_read(peer.session, [here.address + 4 * MIB], [peer.address + 4 * MIB], [8 * count]) == 0
    got = here[4 * MIB : 4 * MIB + 8 * count]
    for place in range(count):
        assert got[8 * place : 8 * place + 7] == here[7 * place : 7 * place + 7]
    assert engine.transfer_sync(peer.session, here.address, peer.address, 4 * MIB, TransferOpcode.Write) == 0
    assert engine.unregister_memory(here.address) == 0


def test_what_is_not_registered_is_a_code(engine, peer, memory):
    here = memory(MIB)
    assert engine.transfer_sync_read(peer.session, here.address, peer.address, 5) == -1
    assert engine.register_memory(here.address, MIB) == 0
    assert engine.register_memory(here.address, MIB) == -7
    assert engine.register_memory(here.address + 100, 5) == -7
    assert engine.register_memory(here.address, 0) == -1
    assert engine.register_memory(0, 100) == -1
    assert engine.register_memory(4096, 100) == -1
    for remote in (4096, peer.address - 1, peer.address + 8 * MIB - 2, (1 << 63) - 1, 1 << 64):
        assert engine.transfer_sync_read(peer.session, here.address, remote, 5) == -1
    assert engine.transfer_sync_read(peer.session, here.address + MIB - 4, peer.address, 5) == -1
    assert engine.batch_transfer_sync_read(peer.session, [here.address], [], [5]) == -1
    assert engine.batch_register_memory([here.address], []) == -1
    assert engine.unregister_memory(here.address) == 0
    assert engine.unregister_memory(here.address) == -3
    other = memory(MIB)
    assert engine.batch_register_memory([here.address, other.address, here.address], [MIB] * 3) == -7
    assert engine.batch_register_memory([here.address, other.address], [MIB] * 2) == 0, "all or none"
    assert engine.batch_unregister_memory([here.address, other.address]) == 0


def test_a_peer_may_register_anew(engine, peer, memory):
    here = memory(MIB)
    engine.register_memory(here.address, MIB)
    assert engine.transfer_sync_read(peer.session, here.address, peer.address, 5) == 0
    assert peer.ask("unregister") == "0"
    assert engine.transfer_sync_read(peer.session, here.address, peer.address, 5) == -1
    assert peer.ask("register") == "0"
    assert engine.transfer_sync_read(peer.session, here.address, peer.address + 4 * MIB - 2, 5) == 0


def test_batches_go_on_by_themselves(engine, peer, memory):
    here = memory(MIB)
    engine.register_memory(here.address, MIB)
    number = engine.batch_transfer_async_read(peer.session, [here.address], [peer.address], [5])
    assert 0 < number < 1 << 63
    until = time.monotonic() + 20
    while (status := engine.transfer_check_status(number)) == 0:
        assert time.monotonic() < until
    assert status == 1 and here[:5] == b"hello"
    assert engine.transfer_check_status(number) == -1, "what has ended is forgotten"
    numbers = [engine.batch_transfer_async_write(peer.session, [here.address], [peer.address], [100]) for _ in range(10)]
    assert len(set(numbers)) == 10
    assert engine.get_batch_transfer_status(numbers) == 0
    assert engine.get_batch_transfer_status(numbers) == -1
    assert engine.batch_transfer_async_read(peer.session, [4096], [peer.address], [5]) == 0
    assert engine.transfer_submit_write(peer.session, here.address, peer.address, 5) > 0


def test_peers_are_told(engine, peer, memory):
    here = memory(100, b"x" * 100)
    engine.register_memory(here.address, 100)
    notify = TransferNotify("name", "message")
    assert engine.transfer_sync(peer.session, here.address, peer.address, 10, TransferOpcode.Write, notify) == 0
    assert engine.transfer_sync(peer.session, here.address, peer.address, 0, TransferOpcode.Write, TransferNotify("", "ü")) == 0
    assert peer.ask("notifies") == "[('name', 'message'), ('', 'ü')]"
    assert peer.ask("notifies") == "[]"
    assert engine.get_notifies() == []


def test_a_peer_that_is_gone_is_a_code(engine, peer, memory, monkeypatch):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "5")
    here = memory(100)
    engine.register_memory(here.address, 100)
    assert engine.send_probe(peer.session) == 0
    assert engine.transfer_sync_read(peer.session, here.address, peer.address, 5) == 0
    assert engine.get_first_buffer_address(peer.session) == peer.address
    peer.process.kill()
    peer.process.wait()
    assert engine.transfer_sync_read(peer.session, here.address, peer.address, 5) == -1
    assert engine.send_probe(peer.session) != 0
    assert engine.get_first_buffer_address(peer.session) == 0
    assert engine.send_probe("nowhere") != 0
    again = Peer()
    assert engine.transfer_sync_read(again.session, here.address, again.address, 5) == 0
    again.process.kill()
    again.process.wait()


def test_peers_are_found_by_a_metadata_server(memory):
    server = http_metadata_server.serve("127.0.0.1", 0)
    metadata = f"http://127.0.0.1:{server.server_address[1]}/metadata"
    peer = Peer("127.0.0.1:12345", metadata)
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1:12346", metadata, "tcp", "") == 0
    here = memory(100)
    engine.register_memory(here.address, 100)
    assert engine.transfer_sync_read("127.0.0.1:12345", here.address, peer.address, 5) == 0
    assert here[:5] == b"hello"
    peer.process.kill()
    peer.process.wait()
    server.shutdown()
    assert TransferEngine().initialize_ext("127.0.0.1", "127.0.0.1:6379", "tcp", "", "redis") == -1
    assert TransferEngine().initialize("127.0.0.1", "http://127.0.0.1:1/metadata", "tcp", "") == -1


def test_calls_before_initialize_are_codes(memory):
    engine, here = TransferEngine(), memory(100)
    assert engine.get_rpc_port() == 0
    assert engine.register_memory(here.address, 100) == -1
    assert engine.unregister_memory(here.address) == -1
    assert engine.transfer_sync_read("127.0.0.1:1", here.address, 4096, 5) == -1
    assert engine.batch_transfer_async_read("127.0.0.1:1", [here.address], [4096], [5]) == 0
    assert engine.send_probe("127.0.0.1:1") == -1
    assert engine.get_notifies() == []
    assert engine.allocate_managed_buffer(100) == 0


def test_what_initialize_can_not_mean_is_a_code(monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0") == -1
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "pigeon", "") == -1
    assert TransferEngine().initialize("127.0.0.1", "etcd://127.0.0.1:2379", "tcp", "") == -1
    assert TransferEngine().initialize("192.0.2.1", "P2PHANDSHAKE", "tcp", "") == -1
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0


def test_managed_buffers_and_bytes_at_addresses(engine):
    address = engine.allocate_managed_buffer(4096)
    assert address > 0
    assert engine.write_bytes_to_buffer(address, b"abc", 3) == 0
    assert engine.read_bytes_from_buffer(address, 3) == b"abc"
    assert engine.write_bytes_to_buffer(4096, b"abc", 3) == -1
    assert engine.read_bytes_from_buffer(4096, 3) == b""
    assert engine.free_managed_buffer(address, 4096) == 0
    assert engine.free_managed_buffer(address, 4096) == -3


def test_a_store_takes_an_engine(engine, node):
    inner = engine.get_engine()
    assert isinstance(inner, InnerTransferEngine)
    store = MooncakeDistributedStore()
    host = f"127.0.0.1:{engine.get_rpc_port()}"
    assert store.setup(host, "P2PHANDSHAKE", 1 << 20, 16 << 20, "tcp", "", node.grpc, inner) == 0
    store.close()
