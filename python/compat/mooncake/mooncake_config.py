"""``MooncakeConfig``: settings from a JSON file or the environment."""

import json
import os
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Union

from . import _codes

DEFAULT_GLOBAL_SEGMENT_SIZE = 3_355_443_200
DEFAULT_LOCAL_BUFFER_SIZE = 1_073_741_824
_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}
_TRUE, _FALSE = ("true", "1", "yes", "on", "enable"), ("false", "0", "no", "off", "disable", "")


def _parse_segment_size(value: Union[int, str]) -> int:
    """Bytes, of a number or a text such as ``4GB``. ValueError for what is neither."""
    return _codes.size(value)


def _parse_global_segment_size(value: Union[int, str, None]) -> int:
    """As ``_parse_segment_size``; the default for nothing."""
    return _codes.size(value, DEFAULT_GLOBAL_SEGMENT_SIZE)


def _parse_bool(value: Union[bool, int, float, str, None]) -> bool:
    """Of a number, or a word such as ``on`` or ``no``. ValueError for another."""
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    word = str(value).strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(f"Invalid boolean value: {value!r}")
    return word in _TRUE


@dataclass
class MooncakeConfig:
    """Settings of a client. ValueError if a size is negative, or a name empty that has no default."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: Optional[str]
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self) -> None:
        for name in (*_REQUIRED, "protocol"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"Config field {name!r} must be a non-empty string, got {text!r}.")
        self.protocol = self.protocol.strip().lower()
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid {name}: {getattr(self, name)}. Size must be non-negative.")

    def changed(self, settings: Mapping[str, Any]) -> "MooncakeConfig":
        """The same with other values of these settings, as a file has them. ValueError for what can't be meant, or is none."""
        unknown = [name for name in settings if name not in _VARIABLES]
        if unknown:
            raise ValueError(f"There is no setting {unknown[0]!r}")
        return _of({**vars(self), **settings})

    @staticmethod
    def from_file(file_path: str) -> "MooncakeConfig":
        """Of a JSON file. ValueError if a field is missing that has no default."""
        with open(file_path, encoding="utf-8") as file:
            return _of(json.load(file))

    @staticmethod
    def load_from_env() -> "MooncakeConfig":
        """Of the file that ``MOONCAKE_CONFIG_PATH`` names, else of the environment. ValueError without either."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path:
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError("Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set.")
        named = {"local_hostname": os.environ.get("LOCAL_HOSTNAME", "localhost"), "metadata_server": "P2PHANDSHAKE"}
        found = {name: os.environ[variable] for name, variable in _VARIABLES.items() if variable in os.environ}
        return _of({**named, **found})


def _of(config: Mapping[str, Any]) -> MooncakeConfig:
    for name in _REQUIRED:
        if name not in config:
            raise ValueError(f"Missing required config field: {name}")
    return MooncakeConfig(
        config["local_hostname"],
        config["metadata_server"],
        _codes.size(config.get("global_segment_size"), DEFAULT_GLOBAL_SEGMENT_SIZE),
        _codes.size(config.get("local_buffer_size"), DEFAULT_LOCAL_BUFFER_SIZE),
        config.get("protocol", "tcp"),
        config.get("device_name", ""),
        config["master_server_address"],
        _parse_bool(config.get("enable_ssd_offload")),
        str(config.get("ssd_offload_path") or ""),
        str(config.get("tenant_id") or "default"),
        _parse_bool(config.get("enable_client_http_server")),
        int(config.get("client_http_port", 9300)),
    )
