"""Views of many objects."""

from typing import List, Union

from ._native import View
from .errors import TidepoolError


class Views(List[Union[View, None, TidepoolError]]):
    """One view, None (no such object) or error a key. As a context manager it releases them all."""

    def release(self) -> None:
        """Releases each view."""
        for view in self:
            if isinstance(view, View):
                view.release()

    def __enter__(self) -> "Views":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()


def single(views: Views) -> Union[View, None]:
    """The only one of them; raises what it failed with."""
    (view,) = views
    if isinstance(view, TidepoolError):
        raise view
    return view
