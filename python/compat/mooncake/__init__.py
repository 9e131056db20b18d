"""The Python modules of Mooncake, over Tidepool. Names, arguments and return codes are Mooncake's; the code is ours."""

__version__ = "0.1.0"
