"""``MooncakeConfig``: settings from a JSON file or the environment."""

import json
import os
from dataclasses import dataclass
from typing import Optional, Union

from . import _codes

DEFAULT_GLOBAL_SEGMENT_SIZE = 3_355_443_200
DEFAULT_LOCAL_BUFFER_SIZE = 1_073_741_824


def _parse_global_segment_size(value: Union[int, str, None]) -> int:
    """Bytes, of a number or a text such as ``4GB``."""
    return _codes.size(value, DEFAULT_GLOBAL_SEGMENT_SIZE)


@dataclass
class MooncakeConfig:
    """Settings of a client."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: Optional[str]
    master_server_address: str

    @staticmethod
    def from_file(file_path: str) -> "MooncakeConfig":
        """Of a JSON file. Raises ValueError if a field is missing that has no default."""
        with open(file_path, encoding="utf-8") as file:
            config = json.load(file)
        for name in ("local_hostname", "metadata_server", "master_server_address"):
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
        )

    @staticmethod
    def load_from_env() -> "MooncakeConfig":
        """Of the file that ``MOONCAKE_CONFIG_PATH`` names, else of the environment. Raises ValueError without either."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path:
            return MooncakeConfig.from_file(path)
        master = os.environ.get("MOONCAKE_MASTER")
        if not master:
            raise ValueError("Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set.")
        environment = os.environ
        return MooncakeConfig(
            environment.get("MOONCAKE_LOCAL_HOSTNAME", environment.get("LOCAL_HOSTNAME", "localhost")),
            environment.get("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
            _codes.size(environment.get("MOONCAKE_GLOBAL_SEGMENT_SIZE"), DEFAULT_GLOBAL_SEGMENT_SIZE),
            _codes.size(environment.get("MOONCAKE_LOCAL_BUFFER_SIZE"), DEFAULT_LOCAL_BUFFER_SIZE),
            environment.get("MOONCAKE_PROTOCOL", "tcp"),
            environment.get("MOONCAKE_DEVICE", ""),
            master,
        )
