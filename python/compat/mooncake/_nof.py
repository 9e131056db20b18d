"""NVMe over fabrics: not built."""

from ._codes import NOT_SUPPORTED


class MooncakeDistributedNoFRegister:
    """Answers -1012 to everything."""

    def real_register(self, *_arguments: object) -> int:
        """Not supported."""
        return NOT_SUPPORTED

    def real_unregister_by_endpoint(self, *_arguments: object) -> int:
        """Not supported."""
        return NOT_SUPPORTED
