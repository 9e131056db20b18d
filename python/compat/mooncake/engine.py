"""``mooncake.engine``: the transfer engine, over Tidepool's."""

import json
import logging
import os
import struct
import threading
import urllib.error
import urllib.parse
import urllib.request
from enum import Enum
from typing import Dict, List, Optional, Sequence

import tidepool
from tidepool import _native

from . import _setup
from ._memory import Memory
from ._rpc import ReceivedData, ReceivedTensor, RpcInterface, create_rpc_client, create_rpc_server
from ._shared_segment import SharedSegment

log = logging.getLogger("mooncake.engine")

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False

_FAILED = -1
_ADDRESS_NOT_REGISTERED = -3
_ADDRESS_OVERLAPPED = -7
_NOT_IMPLEMENTED = -303

# Batches whose status nobody asked for; more are refused.
BATCHES = 65_536
_FAILURES = (tidepool.TidepoolError, BufferError, OverflowError)
_NOTIFY = struct.Struct("<I")


class TransferOpcode(Enum):
    """Which way bytes go."""

    Read = 0
    Write = 1


CoroRPCInterface = RpcInterface

Read = TransferOpcode.Read
Write = TransferOpcode.Write


class TransferNotify:
    """What a peer is told after a transfer."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name, self.msg = name, msg

    def __repr__(self) -> str:
        return f"TransferNotify({self.name!r}, {self.msg!r})"


class InnerTransferEngine:
    """What ``get_engine`` gives, for ``setup`` of a store."""

    def __init__(self, engine: "TransferEngine") -> None:
        self._engine = engine


class TransferEngine:
    """Moves bytes between registered memory of processes, which is named by its address on both sides.

    A peer is named by its session, ``HOST:PORT`` with the host that it gave to ``initialize`` and its ``get_rpc_port``. Codes
    are 0 for success and negative for failures. Calls before ``initialize`` answer -1.
    """

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        self._engine: Optional[_native.Engine] = None
        self._metadata = ""
        self._memory = Memory()
        self._batches: Dict[int, _native.Transfer] = {}
        self._next_batch = 1
        self._lock = threading.Lock()

    # Starting.

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Starts to listen at the host on a port of its own choice. 0, or -1.

        ``metadata_server`` is ``P2PHANDSHAKE``, or the address of an HTTP metadata server, where the engine's name is kept.
        """
        return self.initialize_ext(local_hostname, metadata_server, protocol, device_name, "")

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        """As ``initialize``, with the type of the metadata server: only ``http`` is there."""
        if self._engine is not None:
            return 0
        if _setup.check_protocol(protocol):
            return _FAILED
        metadata = _metadata_address(metadata_server, metadata_type)
        if metadata is None:
            log.error("metadata server %r is not supported: give P2PHANDSHAKE or http://", metadata_server)
            return _FAILED
        host = _host_of(local_hostname)
        try:
            engine = _native.Engine([f"{host}:0"], None, True)
        except _FAILURES as error:
            log.error("initialize: %s", error)
            return _FAILED
        if metadata and not _put_metadata(metadata, local_hostname, f"{host}:{engine.addresses[0][1]}"):
            engine.close()
            return _FAILED
        self._engine, self._metadata = engine, metadata
        return 0

    def get_rpc_port(self) -> int:
        """Where it listens; 0 before ``initialize``."""
        return self._engine.addresses[0][1] if self._engine else 0

    def get_engine(self) -> InnerTransferEngine:
        """For ``setup`` of a store."""
        return InnerTransferEngine(self)

    def get_engine_ptr(self) -> int:
        """There is no C++ engine: 0."""
        return 0

    def get_local_topology(self, device_name: Optional[str] = None) -> str:
        """Devices by memory location, as JSON: this host's memory, and no devices."""
        return json.dumps({"cpu:0": [[], []]})

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Not implemented: -303."""
        return _NOT_IMPLEMENTED

    # Memory.

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Registers memory, which must stay until it is unregistered. -7 if it overlaps registered memory."""
        try:
            if self._engine is None:
                return _FAILED
            self._engine.register(buffer_addr, capacity)
        except _FAILURES as error:
            return _ADDRESS_OVERLAPPED if getattr(error, "reason", "") == "OVERLAP" else _FAILED
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        """Unregisters memory; waits for its transfers. -3 if nothing is registered there."""
        try:
            if self._engine is None:
                return _FAILED
            self._engine.unregister(buffer_addr)
        except _FAILURES as error:
            return _ADDRESS_NOT_REGISTERED if getattr(error, "reason", "") == "NOT_REGISTERED" else _FAILED
        return 0

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Registers several; all or none."""
        if len(buffer_addresses) != len(capacities):
            return _FAILED
        for place, (address, capacity) in enumerate(zip(buffer_addresses, capacities)):
            code = self.register_memory(address, capacity, location)
            if code:
                for registered in list(buffer_addresses)[:place]:
                    self.unregister_memory(registered)
                return code
        return 0

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Unregisters several; the first failure's code."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), 0)

    def allocate_managed_buffer(self, length: int) -> int:
        """Address of new registered memory; 0 if there is none."""
        address = self._memory.allocate(length) if self._engine else 0
        if address and self.register_memory(address, length):
            self._memory.free(address)
            return 0
        return address

    def free_managed_buffer(self, address: int, length: int) -> int:
        """Gives it back."""
        code = self.unregister_memory(address)
        return code if code else (0 if self._memory.free(address) else _FAILED)

    def write_bytes_to_buffer(self, dest_address: int, src_data: str, length: int) -> int:
        """Copies bytes to an address."""
        data = src_data.encode() if isinstance(src_data, str) else bytes(src_data)
        try:
            _native.write_memory(dest_address, data[:length])
        except _FAILURES:
            return _FAILED
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """The bytes at an address; ``b""`` if there are none."""
        try:
            return _native.read_memory(source_address, length)
        except _FAILURES:
            return b""

    def get_first_buffer_address(self, segment_name: str) -> int:
        """The lowest address that a peer has registered; 0 if there is none."""
        try:
            regions = self._engine.regions_of(self._session(segment_name), 5.0) if self._engine else []
        except _FAILURES:
            return 0
        return regions[0][0] if regions else 0

    # Transfers that are waited for.

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Writes to a peer's memory. 0, or -1."""
        return self._transfer(target_hostname, [buffer], [peer_buffer_address], [length], True)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Reads a peer's memory. 0, or -1."""
        return self._transfer(target_hostname, [buffer], [peer_buffer_address], [length], False)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: Optional[TransferNotify] = None,
        transport_hint: str = "",
    ) -> int:
        """Either way; then tells the peer. A length of 0 only tells."""
        return self._transfer(target_hostname, [buffer], [peer_buffer_address], [length], _writes(opcode), notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Writes many ranges."""
        return self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths, True)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Reads many ranges."""
        return self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths, False)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: Optional[TransferNotify] = None,
        transport_hint: str = "",
    ) -> int:
        """Either way, many ranges; then tells the peer."""
        return self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths, _writes(opcode), notify)

    def _transfer(
        self,
        target: str,
        local: Sequence[int],
        remote: Sequence[int],
        lengths: Sequence[int],
        write: bool,
        notify: Optional[TransferNotify] = None,
    ) -> int:
        if self._engine is None:
            return _FAILED
        try:
            session, timeout = self._session(target), _timeout(lengths)
            self._engine.transfer(session, list(local), list(remote), list(lengths), write, timeout)
            if notify is not None:
                name = notify.name.encode()
                self._engine.notify(session, _NOTIFY.pack(len(name)) + name + notify.msg.encode(), timeout)
        except _FAILURES as error:
            log.error("%s %s: %s", "write to" if write else "read from", target, error)
            return _FAILED
        return 0

    # Transfers that go on by themselves.

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Starts writing many ranges: a number for it, 0 if that failed."""
        return self._start(target_hostname, buffers, peer_buffer_addresses, lengths, True)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Starts reading many ranges: a number for it, 0 if that failed."""
        return self._start(target_hostname, buffers, peer_buffer_addresses, lengths, False)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Starts either way."""
        return self._start(target_hostname, buffers, peer_buffer_addresses, lengths, _writes(opcode))

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Starts one write."""
        return self._start(target_hostname, [buffer], [peer_buffer_address], [length], True)

    def _start(
        self, target: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int], write: bool
    ) -> int:
        if self._engine is None:
            return 0
        try:
            session = self._session(target)
            batch = self._engine.start(session, list(local), list(remote), list(lengths), write, _timeout(lengths))
        except _FAILURES as error:
            log.error("%s %s: %s", "write to" if write else "read from", target, error)
            return 0
        with self._lock:
            if len(self._batches) >= BATCHES:
                return 0
            number, self._next_batch = self._next_batch, self._next_batch + 1
            self._batches[number] = batch
        return number

    def transfer_check_status(self, batch_id: int) -> int:
        """1: done. 0: on its way. -1: failed. -2: out of time. What has ended is forgotten."""
        with self._lock:
            batch = self._batches.get(batch_id)
        if batch is None:
            return _FAILED
        try:
            if not batch.poll():
                return 0
            code = 1
        except tidepool.DeadlineError:
            code = -2
        except tidepool.TidepoolError:
            code = -1
        with self._lock:
            self._batches.pop(batch_id, None)
        return code

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for all: 0, or -1 if one failed. They are forgotten."""
        code = 0
        for number in batch_ids:
            with self._lock:
                batch = self._batches.pop(number, None)
            try:
                if batch is None:
                    code = _FAILED
                else:
                    batch.wait()
            except tidepool.TidepoolError:
                code = _FAILED
        return code

    # Peers.

    def send_probe(self, peer_server_name: str) -> int:
        """0 if the peer is there."""
        if self._engine is None:
            return _FAILED
        try:
            self._engine.probe(self._session(peer_server_name), 5.0)
        except _FAILURES:
            return _FAILED
        return 0

    def get_notifies(self) -> List[TransferNotify]:
        """What peers told since the last call."""
        notifications = self._engine.notifications() if self._engine else []
        return [notify for notify in map(_decode_notify, notifications) if notify is not None]

    def _session(self, name: str) -> str:
        found = _get_metadata(self._metadata, name) if self._metadata else None
        return found or name


def _writes(opcode: TransferOpcode) -> bool:
    if not isinstance(opcode, TransferOpcode):
        raise TypeError(f"opcode is TransferOpcode, not {type(opcode).__name__}")
    return opcode is TransferOpcode.Write


def _timeout(lengths: Sequence[int]) -> float:
    base = float(os.environ.get("MC_TRANSFER_TIMEOUT", "30"))
    return max(5.0, base) + sum(lengths) / 1e9


def _decode_notify(notification: bytes) -> Optional[TransferNotify]:
    if len(notification) < _NOTIFY.size:
        return None
    (length,) = _NOTIFY.unpack_from(notification)
    name, msg = notification[4 : 4 + length], notification[4 + length :]
    return TransferNotify(name.decode(errors="replace"), msg.decode(errors="replace"))


def _host_of(local_hostname: str) -> str:
    """Without the port, which the engine picks itself."""
    if local_hostname.startswith("["):
        return local_hostname.partition("]")[0] + "]"
    return local_hostname.partition(":")[0] if local_hostname.count(":") <= 1 else f"[{local_hostname}]"


def _metadata_address(server: str, kind: str) -> Optional[str]:
    """Empty for peers that find each other by address; None if there is no such way."""
    if server.upper() == "P2PHANDSHAKE":
        return ""
    if server.startswith(("http://", "https://")):
        return server
    return f"http://{server}" if kind == "http" else None


def _metadata_url(server: str, name: str) -> str:
    return f"{server}?key={urllib.parse.quote(f'tidepool/session/{name}', safe='')}"


def _put_metadata(server: str, name: str, session: str) -> bool:
    request = urllib.request.Request(_metadata_url(server, name), session.encode(), method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=3):
            return True
    except OSError as error:
        log.error("metadata server %s: %s", server, error)
        return False


def _get_metadata(server: str, name: str) -> Optional[str]:
    try:
        with urllib.request.urlopen(_metadata_url(server, name), timeout=3) as answer:
            return answer.read(1024).decode()
    except (OSError, ValueError):
        return None
