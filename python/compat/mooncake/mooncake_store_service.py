"""``mc_store_rest_server``: a store's client that answers HTTP, and lends memory when it is asked to.

It listens on 127.0.0.1 unless ``--host`` says otherwise: whoever reaches it may read and change all values.
"""

import argparse
import json
import logging
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
from urllib.parse import unquote, urlsplit

from ._codes import OK
from .mooncake_config import MooncakeConfig
from .store import MooncakeDistributedStore

log = logging.getLogger("mooncake")

BODY_BYTES = 100 << 20
# More wait until others have ended.
CONNECTIONS = 64
LONGEST_GRACE_SECONDS = 3600


class Answer(NamedTuple):
    """What a request is answered with."""

    status: int
    body: bytes
    content_type: str = "application/json"


def _said(code: int, /, **said: Any) -> Answer:
    return Answer(code, json.dumps(said).encode())


class _BadRequest(Exception):
    """What is wrong with a request."""


class MooncakeStoreService:
    """A store by HTTP. ValueError if the settings can't be meant."""

    def __init__(self, config_path: Optional[str] = None, cli_config: Optional[Dict[str, str]] = None) -> None:
        """Of a file, or of what ``MooncakeConfig.load_from_env`` finds; ``cli_config`` overrides single settings."""
        config = MooncakeConfig.from_file(config_path) if config_path else MooncakeConfig.load_from_env()
        self.config = config.changed(cli_config or {})
        self.store: Optional[MooncakeDistributedStore] = None
        self.current_mode = "prefill"
        self._routes: Dict[Tuple[str, str], Callable[..., Answer]] = {
            ("PUT", "put"): self._put,
            ("GET", "get"): self._get,
            ("GET", "exist"): self._exist,
            ("DELETE", "remove"): self._remove,
            ("DELETE", "remove_all"): self._remove_all,
            ("POST", "mount"): self._mount,
            ("POST", "unmount"): self._unmount,
            ("POST", "unmount_local_disk"): self._unmount_local_disk,
            ("POST", "mount_shm"): self._mount_shm,
            ("POST", "unmount_shm"): self._unmount_shm,
            ("POST", "reconfigure"): self._reconfigure,
        }

    def start_store_service(self, max_wait_time: float = 60.0) -> bool:
        """Sets the store up, once a second until it succeeds or that time is over."""
        end, config = time.monotonic() + max_wait_time, self.config
        settings = {
            "local_hostname": config.local_hostname,
            "metadata_server": config.metadata_server,
            "global_segment_size": config.global_segment_size,
            "local_buffer_size": config.local_buffer_size,
            "protocol": config.protocol,
            "rdma_devices": config.device_name or "",
            "master_server_addr": config.master_server_address,
            "enable_ssd_offload": config.enable_ssd_offload,
            "ssd_offload_path": config.ssd_offload_path,
            "tenant_id": config.tenant_id,
        }
        while True:
            store = MooncakeDistributedStore()
            code = store.setup(settings)
            if code == OK:
                self.store = store
                return True
            left = end - time.monotonic()
            log.warning("store service: setup failed with %s, %.0f s left", code, max(0.0, left))
            if left <= 0:
                return False
            time.sleep(min(1.0, left))

    def http_server(self, host: str = "127.0.0.1", port: int = 8080) -> ThreadingHTTPServer:
        """A server for the store; port 0 picks one. ``serve_forever`` runs it."""
        return _Server((host, port), _handler(self))

    def stop(self) -> None:
        """Closes the store, and ends what it lends."""
        store, self.store = self.store, None
        if store is not None and store.close() != OK:
            log.warning("store service: the store did not close well")

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """To one request."""
        prefix, _, rest = urlsplit(path).path.lstrip("/").partition("/")
        name, slash, key = rest.partition("/")
        route = self._routes.get((method, name)) if prefix == "api" else None
        takes_key = name in ("get", "exist", "remove")
        if route is None or takes_key != bool(slash and key):
            return _said(404, error="Not found")
        if self.store is None:
            return _said(503, error="The store is closed")
        try:
            if takes_key:
                return route(unquote(key, errors="strict"))
            return route() if method == "DELETE" else route(_fields(body))
        except _BadRequest as error:
            return _said(400, error=str(error))
        except UnicodeDecodeError:
            return _said(400, error="The key is not UTF-8")

    # Values.

    def _put(self, fields: Dict[str, Any]) -> Answer:
        key, value = fields.get("key"), fields.get("value")
        if not isinstance(key, str) or not key or not isinstance(value, str):
            raise _BadRequest("Missing key or value")
        if self.store.put(_text(key).decode(), _text(value)) != OK:
            return _said(500, error="PUT operation failed")
        return _said(200, status="success")

    def _get(self, key: str) -> Answer:
        value = self.store.get(key)
        if value:
            return Answer(200, value, "application/octet-stream")
        exists = self.store.is_exist(key)
        if exists == 0:
            return _said(404, error="Key not found")
        return _said(500, error="GET operation failed" if exists > 0 else "Exist check failed")

    def _exist(self, key: str) -> Answer:
        exists = self.store.is_exist(key)
        return _said(500, error="Exist check failed") if exists < 0 else _said(200, exists=exists > 0)

    def _remove(self, key: str) -> Answer:
        if self.store.remove(key) != OK:
            return _said(500, error="Remove operation failed")
        return _said(200, status="success")

    def _remove_all(self) -> Answer:
        removed = self.store.remove_all()
        if removed < 0:
            return _said(500, error="RemoveAll operation failed")
        return _said(200, status=f"success removed {removed} keys")

    # Memory.

    def _mount(self, fields: Dict[str, Any]) -> Answer:
        size = fields.get("size")
        if type(size) is not int or size <= 0:
            raise _BadRequest("Invalid size, must be a positive integer")
        protocol, location = fields.get("protocol", self.config.protocol), fields.get("location", "")
        mounted = self.store.allocate_and_mount_segment(size, protocol, location)
        if mounted["ret"] != OK:
            return _said(500, error=f"Allocate and mount failed, ret={mounted['ret']}")
        segments, allocated = list(mounted["segment_ids"]), mounted["allocated_size"]
        return _said(200, status="success", segment_ids=segments, allocated_size=allocated)

    def _unmount(self, fields: Dict[str, Any]) -> Answer:
        code = self.store.unmount_and_free_segment(_segments(fields), _grace(fields))
        return _said(200, status="success") if code == OK else _said(500, error=f"Unmount and free failed, ret={code}")

    def _unmount_local_disk(self, fields: Dict[str, Any]) -> Answer:
        code = self.store.unmount_local_disk_segment(_grace(fields))
        return _said(200, status="success") if code == OK else _said(500, error=f"Unmount local disk failed, ret={code}")

    def _mount_shm(self, fields: Dict[str, Any]) -> Answer:
        name, size = fields.get("name"), fields.get("size")
        if not isinstance(name, str) or not name or type(size) is not int or size <= 0:
            raise _BadRequest("Missing name or size")
        mounted = self.store.mount_segment(f"/dev/shm/{name.lstrip('/')}", size)
        if mounted["ret"] != OK:
            return _said(500, error=f"Mount failed, ret={mounted['ret']}")
        return _said(200, status="success", segment_ids=list(mounted["segment_ids"]))

    def _unmount_shm(self, fields: Dict[str, Any]) -> Answer:
        code = self.store.unmount_segment(_segments(fields), _grace(fields))
        return _said(200, status="success") if code == OK else _said(500, error=f"Unmount failed, ret={code}")

    def _reconfigure(self, fields: Dict[str, Any]) -> Answer:
        mode = str(fields.get("mode", "")).lower()
        if mode == "decode":
            path, size = fields.get("path"), fields.get("size")
            if not isinstance(path, str) or not path or type(size) is not int:
                raise _BadRequest("Missing path or size for decode mode")
            return _said(500, error=f"Mount failed, ret={self.store.mount_segment(path, size)['ret']}")
        if mode != "prefill":
            raise _BadRequest("Invalid mode. Use 'decode' or 'prefill'")
        return _said(200, status="success", mode=self.current_mode)


def _fields(body: bytes) -> Dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise _BadRequest("Malformed JSON body") from None
    if not isinstance(fields, dict):
        raise _BadRequest("Request body must be a JSON object")
    return fields


def _text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _BadRequest("A text is not Unicode") from None


def _segments(fields: Dict[str, Any]) -> List[str]:
    segments = fields.get("segment_ids", [])
    segments = [segments] if isinstance(segments, str) else segments
    if not isinstance(segments, list) or not segments or not all(isinstance(each, str) and each for each in segments):
        raise _BadRequest("Missing segment_ids")
    return segments


def _grace(fields: Dict[str, Any]) -> int:
    grace = fields.get("grace_period_seconds", 0)
    if type(grace) is not int or not 0 <= grace <= LONGEST_GRACE_SECONDS:
        raise _BadRequest(f"Invalid grace_period_seconds, must be an integer from 0 to {LONGEST_GRACE_SECONDS}")
    return grace


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


def _handler(service: MooncakeStoreService) -> type:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def _answer(self) -> None:
            length = self.headers.get("Content-Length") or "0"
            if not length.isdigit() or int(length) > BODY_BYTES or self.headers.get("Transfer-Encoding"):
                # What follows is not read.
                self.close_connection = True
                return self._reply(_said(413, error=f"A body has a Content-Length of {BODY_BYTES} at most"))
            body = self.rfile.read(int(length))
            self._reply(service.answer(self.command, self.path, body))

        do_GET = do_PUT = do_POST = do_DELETE = _answer

        def _reply(self, answer: Answer) -> None:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *_arguments: object) -> None:
            pass

    return Handler


def sync_main(arguments: Optional[List[str]] = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="mc_store_rest_server", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", help="JSON file with the settings; else they are the environment's")
    parser.add_argument("-D", "--define", action="append", default=[], help="a setting instead: -Dlocal_hostname=h")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--max-wait-time", type=float, default=60.0, help="seconds in which the store is to be set up")
    options = parser.parse_args(arguments)
    defined = dict(item.partition("=")[::2] for item in options.define)
    try:
        service = MooncakeStoreService(options.config, defined)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    # What it lends is handed over before it goes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not service.start_store_service(options.max_wait_time):
            return 1
        server = service.http_server(options.host, options.port)
        print(f"store at http://{options.host}:{server.server_address[1]}/api", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        service.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(sync_main())
